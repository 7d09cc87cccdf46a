"""A RolloutFleet as it is written in a file -> what the planner is asked."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement import request as asked
from rolloutfleet_operator.plan.placement.fields import Body, Field, raise_faults
from rolloutfleet_operator.plan.placement.nodes import NodeRules, Rule, Toleration
from rolloutfleet_operator.plan.placement.request import AXES, PlacementRequest
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.tree import DEFAULT_LEVELS, Level

_SIZES: Final = ("tensor", "pipeline", "expert")
_OPERATORS: Final = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")


def observe_request(body: Body, levels: Sequence[Level] = DEFAULT_LEVELS) -> PlacementRequest:
    """What a fleet asks.

    Args:
        body: a RolloutFleet.
        levels: for a fleet that names none.

    Raises:
        InvalidSpecError: names every field that breaks a rule.
    """
    root = Field(body)
    fleet, spec = fleet_key(root.at("metadata")), root.at("spec")
    sizes, placement = spec.at("parallelism"), spec.at("placement")
    sizes.only((*_SIZES, "gpusPerNode"))
    placement.only(("levels", "spread", "gpuResource", *AXES))
    request = PlacementRequest(
        fleet=fleet,
        replicas=0 if spec.at("suspend").flag() else spec.at("replicas").number(1),
        levels=_levels(placement.at("levels")) or tuple(levels),
        rules={axis: _rule(placement.at(axis)) for axis in AXES if placement.at(axis).given},
        gpus_per_node=sizes.at("gpusPerNode").number(1, least=1) if sizes.at("gpusPerNode").given else None,
        spread=placement.at("spread").text(),
        gpu_resource=placement.at("gpuResource").text("nvidia.com/gpu"),
        nodes=_node_rules(spec.at("template")),
        fields=_fields(spec),
    )
    if not request.gpu_resource:
        root.faults.append(
            "spec.placement.gpuResource is empty, so the engines run on CPUs, and there are no GPUs to plan for"
        )
    numbers = {axis: sizes.at(axis).number(1, least=1) for axis in _SIZES}
    try:
        parallelism = Parallelism(**numbers)
    except InvalidSpecError as error:
        parallelism = Parallelism()
        root.faults.append(error.message)
    raise_faults(f"fleet {fleet}", root.faults)
    return replace(request, parallelism=parallelism)


def fleet_key(metadata: Field) -> str:
    """Namespace and name of an object, the namespace ``default`` where none is given."""
    return f"{metadata.at('namespace').text('default')}/{metadata.at('name').text('unnamed')}"


def _fields(spec: Field) -> tuple[str, ...]:
    """The fields that count and are given, by their paths below spec."""
    paths = [("replicas",), ("suspend",), *(("parallelism", size) for size in (*_SIZES, "gpusPerNode"))]
    paths += [("placement", name) for name in ("levels", "spread", "gpuResource", *AXES)]
    paths += [("template", name) for name in ("nodeSelector", "tolerations")]
    paths.append(("template", "affinity", "nodeAffinity"))
    return tuple(sorted(".".join(path) for path in paths if spec.at(*path).given))


def _levels(given: Field) -> tuple[Level, ...]:
    found = []
    for each in given.items():
        each.only(("name", "nodeLabel"))
        level = Level(each.at("name").text(), each.at("nodeLabel").text())
        if not (level.name and level.label):
            each.faults.append(f"{each.path} must have a name and a nodeLabel")
        found.append(level)
    return tuple(found)


def _rule(given: Field) -> asked.Rule:
    given.only(("required", "preferred"))
    return asked.Rule(given.at("required").text(), given.at("preferred").text())


def _node_rules(template: Field) -> NodeRules:
    affinity = template.at("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    return NodeRules(
        selector=template.at("nodeSelector").labels(),
        tolerations=tuple(
            Toleration(
                key=each.at("key").text(),
                operator=each.at("operator").choice(("Equal", "Exists"), "Equal"),
                value=each.at("value").text(),
                effect=each.at("effect").text(),
            )
            for each in template.at("tolerations").items()
        ),
        terms=tuple(_term(term) for term in affinity.at("nodeSelectorTerms").items()) if affinity.given else None,
    )


def _term(term: Field) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            each.at("key").text(),
            each.at("operator").choice(_OPERATORS, "In"),
            each.at("values").texts(),
            on_name=kind == "matchFields",
        )
        for kind in ("matchExpressions", "matchFields")
        for each in term.at(kind).items()
    )
