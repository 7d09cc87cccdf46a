"""Raw objects -> :mod:`rolloutfleet_operator.plan.observed`. Each function reads one object and keeps what decisions need."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rolloutfleet.contract.revival import LONGEST
from rolloutfleet_operator import naming
from rolloutfleet_operator.plan.observed import Child, ContainerState, FleetBrief, Job, Node, Pod, WeightSync

Body = Mapping[str, Any]

_MAX_MESSAGE = 1024
_SERVER_METADATA = frozenset({"creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"})


def fleet_key(body: Body) -> tuple[str, str] | None:
    """Namespace and name of the fleet that a labelled object belongs to, None when it carries no label."""
    fleet = _labels(body).get(naming.LABEL_FLEET)
    return (body["metadata"]["namespace"], fleet) if fleet else None


def observe_pod(body: Body) -> Pod:
    """A pod made by the operator, or by the sync Job."""
    metadata, spec, status, labels = body["metadata"], body.get("spec") or {}, body.get("status") or {}, _labels(body)
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    sandbox = conditions.get("PodReadyToStartContainers", {})
    sandbox_missing = bool(spec.get("nodeName")) and sandbox.get("status") == "False"
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=controller_uid(body),
        role=labels.get(naming.LABEL_ROLE, ""),
        phase=status.get("phase", "Pending"),
        created=_time(metadata["creationTimestamp"]),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        address=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        engine=_number(labels, naming.LABEL_ENGINE),
        rank=_number(labels, naming.LABEL_RANK),
        incarnation=_number(labels, naming.LABEL_INCARNATION),
        revision=labels.get(naming.LABEL_REVISION, ""),
        ranks=_number(metadata.get("annotations") or {}, naming.ANNOTATION_RANKS, default=1),
        pods=_number(metadata.get("annotations") or {}, naming.ANNOTATION_PODS, default=1),
        container=_container(status.get("containerStatuses") or (), status),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        sandbox_missing=sandbox_missing,
        mounts=_mounts(spec) if sandbox_missing else "",
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        leaving=_cut((metadata.get("annotations") or {}).get(naming.ANNOTATION_LEAVING, "")),
    )


def _mounts(spec: Mapping[str, Any]) -> str:
    """What has to exist before the pod's containers can be made, in words."""
    words = []
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            words.append(f"folder {volume['hostPath']['path']} on node {spec.get('nodeName', '')}")
        elif "persistentVolumeClaim" in volume:
            words.append(f"PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']}")
        elif "secret" in volume:
            words.append(f"Secret {volume['secret']['secretName']}")
        elif "configMap" in volume:
            words.append(f"ConfigMap {volume['configMap']['name']}")
    return ", ".join(sorted(words))


def observe_job(body: Body) -> Job:
    """The sync Job, or one that sends a checkpoint."""
    metadata, status = body["metadata"], body.get("status") or {}
    ended = [c for c in status.get("conditions") or () if c["type"] in ("Complete", "Failed") and c["status"] == "True"]
    return Job(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=controller_uid(body),
        terminating="deletionTimestamp" in metadata,
        finished=ended[0]["type"] if ended else "",
        message=ended[0].get("message", "") if ended else "",
        role=_labels(body).get(naming.LABEL_ROLE, ""),
        revision=_labels(body).get(naming.LABEL_REVISION, ""),
    )


def observe_weightsync(body: Body) -> WeightSync:
    """A WeightSync, whoever made it."""
    metadata, spec = body["metadata"], body.get("spec") or {}
    floor = spec.get("floor") or {}
    return WeightSync(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        created=_time(metadata["creationTimestamp"]),
        terminating="deletionTimestamp" in metadata,
        floor_epoch=floor.get("epoch", 0),
        floor_version=floor.get("version", 0),
        status=_plain(body.get("status") or {}),
        checkpoint=(spec.get("checkpoint") or {}).get("version"),
        owner_uid=controller_uid(body),
    )


def observe_child(kind: str, body: Body) -> Child:
    """An owned object with what can be compared with its manifest."""
    metadata = body["metadata"]
    content = {key: _plain(value) for key, value in body.items() if key not in ("status", "metadata")}
    content["metadata"] = {key: _plain(value) for key, value in metadata.items() if key not in _SERVER_METADATA}
    return Child(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=controller_uid(body),
        terminating="deletionTimestamp" in metadata,
        content=content,
    )


def observe_fleet(body: Body) -> FleetBrief:
    """A fleet, as its WeightSyncs see it."""
    metadata = body["metadata"]
    weights = (body.get("status") or {}).get("weights") or {}
    return FleetBrief(
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        terminating="deletionTimestamp" in metadata,
        epoch=weights.get("epoch", 0),
        version=weights.get("version", 0),
        revive=revive_of(body),
    )


def revive_of(body: Body) -> str:
    """The value of the fleet's annotation that gives retired engines another chance, cut to what the status holds."""
    return str((body["metadata"].get("annotations") or {}).get(naming.ANNOTATION_REVIVE, ""))[:LONGEST]


def observe_node(body: Body) -> Node:
    """A node's taints, and its extended resources: those with a slash in their name, which are whole numbers."""
    allocatable = (body.get("status") or {}).get("allocatable") or {}
    extended = ((name, amount) for name, amount in allocatable.items() if "/" in name and str(amount).isdigit())
    taints = (body.get("spec") or {}).get("taints") or ()
    return Node(
        name=body["metadata"]["name"],
        extended=tuple(sorted((name, int(amount)) for name, amount in extended)),
        taints=tuple(sorted({str(taint["key"]) for taint in taints})),
    )


def controller_uid(body: Body) -> str:
    """UID of the object's controller, empty when it has none."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return ""


def _container(statuses: Sequence[Body], pod_status: Body) -> ContainerState:
    if not statuses:
        return ContainerState(
            exit_message=_cut(pod_status.get("message", "")), exit_reason=pod_status.get("reason", "")
        )
    status = statuses[0]
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    return ContainerState(
        started=bool(status.get("started")),
        restarts=status.get("restartCount", 0),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=_cut(waiting.get("message", "")),
        exit_code=ended.get("exitCode", 0),
        exit_reason=ended.get("reason", ""),
        exit_message=_cut(ended.get("message", "")),
        ended_at=_time(ended["finishedAt"]) if ended.get("finishedAt") else None,
    )


def _cut(text: str) -> str:
    """The text's end when it is long: an error's last lines say most."""
    text = text.strip()
    return text if len(text) <= _MAX_MESSAGE else "..." + text[-_MAX_MESSAGE:]


def _labels(body: Body) -> Mapping[str, str]:
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels


def _number(values: Mapping[str, str], key: str, default: int = 0) -> int:
    text = values.get(key, "")
    return int(text) if text.isdigit() else default


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _plain(value: Any) -> Any:
    """A copy without views or shared parts, so that it compares and outlives the event."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
