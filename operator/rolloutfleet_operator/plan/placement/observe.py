"""Kubernetes objects, as they are stored or written in a file -> what the planner takes. Faults name object, field, value and rule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rolloutfleet_operator import naming
from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement import request as asked
from rolloutfleet_operator.plan.placement.nodes import NodeFacts, NodeRules, OtherPod, Rule, Taint, Toleration
from rolloutfleet_operator.plan.placement.request import AXES, Placed, PlacementRequest
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.tree import DEFAULT_LEVELS, Level

Body = Mapping[str, Any]

_PASSING_TAINTS: Final = "node.kubernetes.io/"
"""Taints that only repeat what the node's own fields say."""
_PLACEMENT_FIELDS: Final = frozenset({"levels", "spread", "gpuResource", "mode", "rebalance", *AXES})
_PARALLEL_FIELDS: Final = frozenset({"tensor", "pipeline", "expert"})


def observe_request(body: Body, levels: Sequence[Level] = DEFAULT_LEVELS) -> PlacementRequest:
    """What a fleet asks.

    Args:
        body: a RolloutFleet.
        levels: for a fleet that names none.

    Raises:
        InvalidSpecError: names every field that breaks a rule.
    """
    return _Reader(body).read(levels)


class _Reader:
    def __init__(self, body: Body) -> None:
        metadata, self._spec = body.get("metadata") or {}, body.get("spec") or {}
        self._fleet = _key(metadata)
        self._faults: list[str] = []
        self._fields: list[str] = []

    def read(self, levels: Sequence[Level]) -> PlacementRequest:
        placement = self._section("placement", _PLACEMENT_FIELDS)
        sizes = self._section("parallelism", _PARALLEL_FIELDS)
        numbers = {
            axis: self._number(f"parallelism.{axis}", sizes.get(axis, 1), 1)
            for axis in ("tensor", "pipeline", "expert")
        }
        replicas = 0 if self._spec.get("suspend") else self._number("replicas", self._spec.get("replicas", 1), 0)
        resource = placement.get("gpuResource", "nvidia.com/gpu")
        if not resource:
            self._faults.append(
                "placement.gpuResource is empty, so the engines run on CPUs; plan counts GPUs: there is nothing to plan"
            )
        parallelism = Parallelism()
        if not self._faults:
            try:
                parallelism = Parallelism(**numbers)
            except InvalidSpecError as error:
                self._faults.append(error.message)
        request = PlacementRequest(
            fleet=self._fleet,
            replicas=replicas,
            parallelism=parallelism,
            levels=self._levels(placement.get("levels"), levels),
            rules={axis: self._rule(axis, placement[axis]) for axis in AXES if placement.get(axis)},
            spread=str(placement.get("spread") or ""),
            gpu_resource=str(resource),
            nodes=self._node_rules(),
        )
        if self._faults:
            raise InvalidSpecError(f"fleet {self._fleet}: " + "; ".join(sorted(self._faults)))
        fields = [name for name in ("replicas", "suspend") if name in self._spec] + self._fields
        return replace(request, fields=tuple(sorted(fields)))

    def _section(self, name: str, known: frozenset[str]) -> Body:
        given = self._spec.get(name) or {}
        if not isinstance(given, Mapping):
            self._faults.append(f"{name} is {given!r}, but it must be a mapping")
            return {}
        for key in sorted(set(given) - known):
            self._faults.append(f"{name}.{key} is unknown; there are {', '.join(sorted(known))}")
        self._fields += [f"{name}.{key}" for key in given if key in known - {"mode", "rebalance"}]
        return given

    def _number(self, field: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._faults.append(f"{field} is {value!r}, but it must be a whole number of at least {least}")
            return least
        return value

    def _levels(self, given: object, levels: Sequence[Level]) -> tuple[Level, ...]:
        if given is None:
            return tuple(levels)
        if not isinstance(given, list) or not all(
            isinstance(each, Mapping) and each.get("name") and each.get("nodeLabel") for each in given
        ):
            self._faults.append("placement.levels must be a list of {name, nodeLabel}, widest first")
            return tuple(levels)
        return tuple(Level(str(each["name"]), str(each["nodeLabel"])) for each in given)

    def _rule(self, axis: str, given: object) -> asked.Rule:
        if not isinstance(given, Mapping) or set(given) - {"required", "preferred"}:
            self._faults.append(f"placement.{axis} is {given!r}, but it must be {{required: LEVEL, preferred: LEVEL}}")
            return asked.Rule()
        return asked.Rule(str(given.get("required") or ""), str(given.get("preferred") or ""))

    def _node_rules(self) -> NodeRules:
        template = self._spec.get("template") or {}
        self._fields += [f"template.{key}" for key in ("nodeSelector", "tolerations") if key in template]
        node_affinity = (template.get("affinity") or {}).get("nodeAffinity") or {}
        required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        terms = None
        if required:
            self._fields.append("template.affinity.nodeAffinity")
            terms = tuple(_term(term) for term in required.get("nodeSelectorTerms") or ())
        return NodeRules(
            selector={str(key): str(value) for key, value in (template.get("nodeSelector") or {}).items()},
            tolerations=tuple(
                Toleration(
                    key=each.get("key") or "",
                    operator=each.get("operator") or "Equal",
                    value=str(each.get("value") or ""),
                    effect=each.get("effect") or "",
                )
                for each in template.get("tolerations") or ()
            ),
            terms=terms,
        )


def _term(term: Body) -> tuple[Rule, ...]:
    rules = [
        Rule(str(each["key"]), str(each["operator"]), tuple(map(str, each.get("values") or ())), on_name=on_name)
        for field, on_name in (("matchExpressions", False), ("matchFields", True))
        for each in term.get(field) or ()
    ]
    return tuple(rules)


def observe_nodes(nodes: Iterable[Body], pods: Iterable[Body], fleets: Iterable[PlacementRequest]) -> list[NodeFacts]:
    """The nodes with what others hold there.

    Args:
        nodes: every Node.
        pods: every Pod, or none when nothing runs.
        fleets: those that are planned; their engines' pods are no others.

    Raises:
        InvalidSpecError: the fleets count different resources.
    """
    planned = list(fleets)
    resources = sorted({fleet.gpu_resource for fleet in planned}) or ["nvidia.com/gpu"]
    if len(resources) > 1:
        raise InvalidSpecError(f"the fleets count {' and '.join(resources)}; plan those of one resource together")
    names = {fleet.fleet for fleet in planned}
    others: dict[str, list[OtherPod]] = {}
    for pod in pods:
        if _running(pod) and _owner(pod) not in names and (gpus := pod_gpus(pod, resources[0])):
            others.setdefault(pod["spec"]["nodeName"], []).append(OtherPod(_key(pod["metadata"]), gpus))
    return [_node(body, resources[0], others.get(body["metadata"]["name"], [])) for body in nodes]


def _node(body: Body, resource: str, others: Iterable[OtherPod]) -> NodeFacts:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    name, amount = body["metadata"]["name"], str((status.get("allocatable") or {}).get(resource, "0"))
    if not amount.isdigit():
        raise InvalidSpecError(f"node {name}: status.allocatable[{resource}] is {amount!r}, which is no whole number")
    return NodeFacts(
        name=name,
        gpus=int(amount),
        labels={str(key): str(value) for key, value in (body["metadata"].get("labels") or {}).items()},
        others=tuple(sorted(others, key=lambda pod: pod.name)),
        taints=tuple(
            Taint(each["key"], str(each.get("value") or ""), each["effect"])
            for each in spec.get("taints") or ()
            if not each["key"].startswith(_PASSING_TAINTS)
        ),
        cordoned=bool(spec.get("unschedulable")),
        ready=conditions.get("Ready", "True") == "True",
    )


def observe_placed(pods: Iterable[Body], fleets: Iterable[PlacementRequest]) -> list[Placed]:
    """Engines of the fleets whose pods all have nodes: of each rank's pods the newest incarnation."""
    by_name = {fleet.fleet: fleet for fleet in fleets}
    engines: dict[tuple[str, int], dict[int, tuple[int, Body]]] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if not _running(pod) or _owner(pod) not in by_name or "deletionTimestamp" in pod["metadata"]:
            continue
        engine, rank, incarnation = (
            int(labels.get(label, "0")) for label in (naming.LABEL_ENGINE, naming.LABEL_RANK, naming.LABEL_INCARNATION)
        )
        mine = engines.setdefault((_owner(pod), engine), {})
        if rank not in mine or mine[rank][0] < incarnation:
            mine[rank] = (incarnation, pod)
    found = []
    for (fleet, engine), ranks in sorted(engines.items()):
        bodies = [ranks[rank][1] for rank in sorted(ranks)]
        gpus = {pod_gpus(body, by_name[fleet].gpu_resource) for body in bodies}
        if len(bodies) * max(gpus) == by_name[fleet].parallelism.world and len(gpus) == 1:
            found.append(Placed(fleet, engine, tuple(body["spec"]["nodeName"] for body in bodies), gpus.pop()))
    return found


def pod_gpus(pod: Body, resource: str) -> int:
    """GPUs that a pod holds: of its containers together, or of its largest init container."""
    spec = pod.get("spec") or {}

    def of(container: Body) -> int:
        resources = container.get("resources") or {}
        given = (resources.get("limits") or {}).get(resource) or (resources.get("requests") or {}).get(resource) or 0
        return int(given)

    beside = [each for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"]
    before = [of(each) for each in spec.get("initContainers") or () if each.get("restartPolicy") != "Always"]
    return max([sum(of(each) for each in (*(spec.get("containers") or ()), *beside)), *before])


def _running(pod: Body) -> bool:
    phase = (pod.get("status") or {}).get("phase", "")
    return bool((pod.get("spec") or {}).get("nodeName")) and phase not in {"Succeeded", "Failed"}


def _owner(pod: Body) -> str:
    """Key of the fleet whose engine the pod belongs to; empty when it belongs to none."""
    labels = pod["metadata"].get("labels") or {}
    if naming.LABEL_FLEET not in labels or naming.LABEL_ENGINE not in labels:
        return ""
    return _key({"name": labels[naming.LABEL_FLEET], "namespace": pod["metadata"].get("namespace")})


def _key(metadata: Body) -> str:
    name, namespace = metadata.get("name") or "unnamed", metadata.get("namespace") or "default"
    return f"{namespace}/{name}"
