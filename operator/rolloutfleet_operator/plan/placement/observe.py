"""Nodes and Pods as Kubernetes stores them -> what the planner knows of nodes, of others' pods, and of engines that stand already."""

from collections.abc import Iterable
from typing import Final

from rolloutfleet_operator import naming
from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement.asked import fleet_key
from rolloutfleet_operator.plan.placement.fields import Body, Field, raise_faults
from rolloutfleet_operator.plan.placement.nodes import NodeFacts, OtherPod, Taint
from rolloutfleet_operator.plan.placement.request import Placed, PlacementRequest

_PASSING_TAINTS: Final = "node.kubernetes.io/"
"""Taints that only repeat what the node's own fields say."""


def observe_nodes(nodes: Iterable[Body], pods: Iterable[Body], fleets: Iterable[PlacementRequest]) -> list[NodeFacts]:
    """The nodes with what others hold there.

    Args:
        nodes: every Node.
        pods: every Pod, or none when nothing runs.
        fleets: those that are planned; their engines' pods are no others.

    Raises:
        InvalidSpecError: the fleets count different resources, or a field holds something else than it should.
    """
    planned = list(fleets)
    resources = sorted({fleet.gpu_resource for fleet in planned}) or ["nvidia.com/gpu"]
    if len(resources) > 1:
        raise InvalidSpecError(f"the fleets count {' and '.join(resources)}; plan those of one resource together")
    names = {fleet.fleet for fleet in planned}
    others: dict[str, list[OtherPod]] = {}
    for body in pods:
        pod = Field(body)
        key = fleet_key(pod.at("metadata"))
        if _runs(pod) and _owner(pod) not in names and (gpus := pod_gpus(pod, resources[0])):
            others.setdefault(pod.at("spec", "nodeName").text(), []).append(OtherPod(key, gpus))
        raise_faults(f"pod {key}", pod.faults)
    return [_node(Field(body), resources[0], others) for body in nodes]


def _node(node: Field, resource: str, others: dict[str, list[OtherPod]]) -> NodeFacts:
    name, spec = node.at("metadata", "name").text(), node.at("spec")
    conditions = {each.at("type").text(): each.at("status").text() for each in node.at("status", "conditions").items()}
    taints = [
        Taint(each.at("key").text(), each.at("value").text(), each.at("effect").text())
        for each in spec.at("taints").items()
    ]
    facts = NodeFacts(
        name=name,
        gpus=node.at("status", "allocatable", resource).count(),
        labels=node.at("metadata", "labels").labels(),
        others=tuple(sorted(others.get(name, ()), key=lambda pod: pod.name)),
        taints=tuple(taint for taint in taints if not taint.key.startswith(_PASSING_TAINTS)),
        cordoned=spec.at("unschedulable").flag(),
        ready=conditions.get("Ready", "True") == "True",
    )
    raise_faults(f"node {name}", node.faults)
    return facts


def observe_placed(pods: Iterable[Body], fleets: Iterable[PlacementRequest]) -> list[Placed]:
    """Engines of the fleets that have pods on nodes: of each rank's pods the newest incarnation.

    Raises:
        InvalidSpecError: a pod's label is no number, or a field holds something else than it should.
    """
    by_name = {fleet.fleet: fleet for fleet in fleets}
    engines: dict[tuple[str, int], dict[int, tuple[int, Field]]] = {}
    for body in pods:
        pod = Field(body)
        labels, owner = pod.at("metadata", "labels"), _owner(pod)
        if not _runs(pod) or owner not in by_name or pod.at("metadata", "deletionTimestamp").given:
            continue
        engine, rank, incarnation = (
            labels.at(label).count() for label in (naming.LABEL_ENGINE, naming.LABEL_RANK, naming.LABEL_INCARNATION)
        )
        mine = engines.setdefault((owner, engine), {})
        if rank not in mine or mine[rank][0] < incarnation:
            mine[rank] = (incarnation, pod)
        raise_faults(f"pod {fleet_key(pod.at('metadata'))}", pod.faults)
    return [_placed(fleet, engine, ranks, by_name[fleet]) for (fleet, engine), ranks in sorted(engines.items())]


def _placed(fleet: str, engine: int, ranks: dict[int, tuple[int, Field]], request: PlacementRequest) -> Placed:
    pods = [ranks[rank][1] for rank in sorted(ranks)]
    gpus = [pod_gpus(pod, request.gpu_resource) for pod in pods]
    nodes = tuple(pod.at("spec", "nodeName").text() for pod in pods)
    return Placed(fleet, engine, nodes, max(gpus), well=min(gpus) == max(gpus))


def pod_gpus(pod: Field, resource: str) -> int:
    """GPUs that a pod holds: of its containers together, or of its largest init container."""

    def of(container: Field) -> int:
        limit, request = (container.at("resources", kind, resource) for kind in ("limits", "requests"))
        return (limit if limit.given else request).count()

    first = pod.at("spec", "initContainers").items()
    beside = [each for each in first if each.at("restartPolicy").text() == "Always"]
    before = [each for each in first if each.at("restartPolicy").text() != "Always"]
    return max([sum(map(of, (*pod.at("spec", "containers").items(), *beside))), *map(of, before)])


def _runs(pod: Field) -> bool:
    ended = pod.at("status", "phase").text() in {"Succeeded", "Failed"}
    return bool(pod.at("spec", "nodeName").text()) and not ended


def _owner(pod: Field) -> str:
    """Key of the fleet whose engine the pod belongs to; empty when it belongs to none."""
    labels = pod.at("metadata", "labels").mapping()
    if naming.LABEL_FLEET not in labels or naming.LABEL_ENGINE not in labels:
        return ""
    namespace = pod.at("metadata", "namespace").text("default")
    return f"{namespace}/{pod.at('metadata', 'labels', naming.LABEL_FLEET).text()}"
