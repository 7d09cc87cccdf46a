"""The two CustomResourceDefinitions, whole."""

from typing import Any

from pydantic import BaseModel

from rolloutfleet.contract.names import GROUP
from rolloutfleet_operator.api.fleet import FLEET_VALIDATIONS, SPEC_VALIDATIONS, RolloutFleetSpec
from rolloutfleet_operator.api.fleetstatus import RolloutFleetStatus
from rolloutfleet_operator.api.structural import structural_schema
from rolloutfleet_operator.api.weightsync import WEIGHTSYNC_VALIDATIONS, WeightSyncSpec, WeightSyncStatus
from rolloutfleet_operator.naming import FLEET_KIND, FLEET_PLURAL, SYNC_KIND, SYNC_PLURAL, VERSION

_READY = '.status.conditions[?(@.type=="Ready")]'
_ACTIVE = '.status.conditions[?(@.type=="Active")]'


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def fleet_crd() -> dict[str, Any]:
    """The CRD of RolloutFleet."""
    spec = structural_schema(RolloutFleetSpec, defaults=True)
    spec["description"] = "spec is what the fleet should be."
    spec["x-kubernetes-validations"] = SPEC_VALIDATIONS
    names = {"kind": FLEET_KIND, "plural": FLEET_PLURAL, "singular": "rolloutfleet", "shortNames": ["rlfleet"]}
    version = _version(
        "RolloutFleet is a set of vLLM engines whose weights are refitted as one.", spec, RolloutFleetStatus
    )
    version["schema"]["openAPIV3Schema"]["x-kubernetes-validations"] = FLEET_VALIDATIONS
    version["subresources"]["scale"] = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.labelSelector",
    }
    version["additionalPrinterColumns"] = [
        _column("Ready", "string", f"{_READY}.status", "Whether every engine serves and can be refitted."),
        _column("Engines", "integer", ".spec.replicas", "Engines wanted."),
        _column("Serving", "integer", ".status.readyReplicas", "Engines that serve."),
        _column("Weights", "integer", ".status.weights.version", "Committed weight version."),
        _column("Reason", "string", f"{_READY}.reason", "Why Ready stands as it does."),
        _column("Model", "string", ".spec.model.name", "Model that the engines serve.", 1),
        _column("Message", "string", f"{_READY}.message", "Ready, in words.", 1),
        _column("Behind", "integer", ".status.weights.skew", "Engines that do not hold the committed version.", 1),
        _column("Stale", "integer", ".status.weights.stale", "Of these, engines that serve an older one by leave.", 1),
        _AGE,
    ]
    return _crd(names, version)


def weightsync_crd() -> dict[str, Any]:
    """The CRD of WeightSync."""
    spec = structural_schema(WeightSyncSpec, defaults=True)
    spec["description"] = "spec says which fleet is refitted, and by whom."
    spec["x-kubernetes-validations"] = WEIGHTSYNC_VALIDATIONS
    names = {"kind": SYNC_KIND, "plural": SYNC_PLURAL, "singular": "weightsync"}
    version = _version("WeightSync is one run of a fleet's sync job.", spec, WeightSyncStatus)
    version["additionalPrinterColumns"] = [
        _column("Fleet", "string", ".spec.fleetRef.name", "Fleet that is refitted."),
        _column("Active", "string", f"{_ACTIVE}.status", "Whether the fleet's sync job works for this object."),
        _column("Phase", "string", ".status.phase", "Where the sync job stands."),
        _column("Epoch", "integer", ".status.epoch", "Membership of the group."),
        _column("Version", "integer", ".status.version", "Committed weight version."),
        _column("Trainer", "string", ".status.session.trainer", "Trainer that holds the sync job.", 1),
        _column("Transport", "string", ".status.lastRefit.transport", "How the last refit's weights travelled.", 1),
        _column("Pause", "number", ".status.lastRefit.pauseSeconds", "Seconds that the last refit paused engines.", 1),
        _AGE,
    ]
    return _crd(names, version)


def _version(description: str, spec: dict[str, Any], status: type[BaseModel]) -> dict[str, Any]:
    status_schema = structural_schema(status, defaults=False)
    status_schema["description"] = "status is what the operator and the sync job report."
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {
            "openAPIV3Schema": {
                "description": description,
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"type": "object"},
                    "spec": spec,
                    "status": status_schema,
                },
            }
        },
    }


def _crd(names: dict[str, Any], version: dict[str, Any]) -> dict[str, Any]:
    plural = names["plural"]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names | {"listKind": f"{names['kind']}List", "categories": ["rl"]},
            "scope": "Namespaced",
            "versions": [version],
        },
    }
