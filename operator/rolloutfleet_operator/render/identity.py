"""Who an object belongs to: metadata and owner references of everything that the operator makes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolloutfleet_operator import naming

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FleetIdentity:
    """The fleet that an object belongs to."""

    name: str
    namespace: str
    uid: str

    def labels(self, role: str) -> dict[str, str]:
        """The labels that every object carries."""
        return {
            naming.LABEL_FLEET: self.name,
            naming.LABEL_MANAGED_BY: naming.MANAGED_BY_VALUE,
            naming.LABEL_NAME: naming.NAME_VALUE,
            naming.LABEL_ROLE: role,
        }

    def selector(self, role: str) -> dict[str, str]:
        """The labels that a Service selects pods by."""
        return {naming.LABEL_FLEET: self.name, naming.LABEL_ROLE: role}

    def owner(self) -> dict[str, Any]:
        """The controller reference by which the garbage collector removes the object with its fleet."""
        return {
            "apiVersion": naming.API_VERSION,
            "blockOwnerDeletion": True,
            "controller": True,
            "kind": naming.FLEET_KIND,
            "name": self.name,
            "uid": self.uid,
        }

    def metadata(self, name: str, role: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Metadata of an owned object; ``labels`` are added to the common ones."""
        return {
            "labels": dict(sorted({**(labels or {}), **self.labels(role)}.items())),
            "name": name,
            "namespace": self.namespace,
            "ownerReferences": [self.owner()],
        }
