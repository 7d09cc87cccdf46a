"""Where each kind lives in the API server's paths."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from rolloutfleet_operator import naming


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One object, by kind, namespace and name."""

    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "ObjectRef":
        """The object that a manifest describes."""
        metadata = manifest["metadata"]
        return cls(manifest["kind"], metadata["namespace"], metadata["name"])

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"

    def path(self, subresource: str = "") -> str:
        """The object's path, or that of one of its subresources."""
        tail = f"/{subresource}" if subresource else ""
        return f"{collection_path(self.kind, self.namespace)}/{quote(self.name, safe='')}{tail}"


_PREFIXES: Final[Mapping[str, tuple[str, str]]] = {
    naming.COMPUTE_DOMAIN_KIND: (f"/apis/{naming.COMPUTE_DOMAIN_GROUP}/v1beta1", "computedomains"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Pod": ("/api/v1", "pods"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    naming.FLEET_KIND: (f"/apis/{naming.API_VERSION}", naming.FLEET_PLURAL),
    naming.SYNC_KIND: (f"/apis/{naming.API_VERSION}", naming.SYNC_PLURAL),
}


def collection_path(kind: str, namespace: str) -> str:
    """The path under which objects of a kind are made."""
    prefix, plural = _PREFIXES[kind]
    return f"{prefix}/namespaces/{quote(namespace, safe='')}/{plural}"
