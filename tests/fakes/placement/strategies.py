"""Hypothesis strategies: clusters with racks, gaps in labels and other people's pods, and fleets that ask anything that may be asked."""

from dataclasses import dataclass

from hypothesis import strategies as st

from rolloutfleet_operator.plan.placement.nodes import PRODUCT_LABEL, NodeFacts, OtherPod, Taint
from rolloutfleet_operator.plan.placement.request import AXES, Placed, PlacementRequest, Rule
from rolloutfleet_operator.plan.placement.shape import Nesting, Parallelism, find_shape
from rolloutfleet_operator.plan.placement.tree import CLUSTER, HOST, Level

LEVELS = (
    Level("block", "example.com/block"),
    Level("rack", "example.com/rack"),
    Level("nvlink", "example.com/clique"),
    HOST,
)
_WIDE_TO_NARROW = (CLUSTER, *(level.name for level in LEVELS))


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the planner is given."""

    nodes: tuple[NodeFacts, ...]
    requests: tuple[PlacementRequest, ...]
    placed: tuple[Placed, ...]


@st.composite
def situations(draw: st.DrawFn, most_nodes: int = 14) -> Situation:
    nodes = tuple(draw(_node(index)) for index in range(draw(st.integers(1, most_nodes))))
    requests = tuple(draw(_request(name)) for name in ("a", "b")[: draw(st.integers(1, 2))])
    placed = tuple(each for request in requests for each in draw(_placed(request, [node.name for node in nodes])))
    return Situation(nodes, requests, placed)


@st.composite
def _node(draw: st.DrawFn, index: int) -> NodeFacts:
    name, gpus = f"n{index}", draw(st.sampled_from((8, 8, 8, 4, 0)))
    labels = {PRODUCT_LABEL: "four" if gpus == 4 else "eight"}
    for label, values in ((LEVELS[0].label, "ab"), (LEVELS[1].label, "pqr"), (LEVELS[2].label, "xy")):
        if value := draw(st.sampled_from((*values, *values, ""))):
            labels[label] = value
    used = draw(st.sampled_from((0, 0, 0, 1, 2, 4, 8)))
    return NodeFacts(
        name,
        gpus,
        labels,
        (OtherPod(f"x/{name}", used),) if used else (),
        (Taint("example.com/held"),) if draw(st.integers(0, 9)) == 0 else (),
        cordoned=draw(st.integers(0, 9)) == 0,
        ready=draw(st.integers(0, 9)) > 0,
        quarantined=draw(st.integers(0, 19)) == 0,
    )


@st.composite
def _request(draw: st.DrawFn, fleet: str) -> PlacementRequest:
    tensor, data = draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.sampled_from((1, 1, 2, 4)))
    sizes = Parallelism(tensor, draw(st.sampled_from((1, 1, 2, 3))), tensor * data if data > 1 else 1)
    even = [gpus for gpus in range(1, sizes.world + 1) if find_shape(sizes, gpus, Nesting.REPLICAS)]
    rules = {axis: draw(_rule()) for axis in AXES if draw(st.booleans())}
    return PlacementRequest(
        fleet,
        draw(st.integers(0, 5)),
        sizes,
        LEVELS,
        rules,
        gpus_per_node=draw(st.none() | st.sampled_from(even)),
        spread=draw(st.sampled_from(("", "", *_WIDE_TO_NARROW[1:]))),
    )


@st.composite
def _rule(draw: st.DrawFn) -> Rule:
    required = draw(st.integers(0, 4))
    preferred = draw(st.integers(required, 4))
    return Rule(
        _WIDE_TO_NARROW[required] if draw(st.booleans()) else "",
        _WIDE_TO_NARROW[preferred] if draw(st.booleans()) else "",
    )


@st.composite
def _placed(draw: st.DrawFn, request: PlacementRequest, names: list[str]) -> list[Placed]:
    """Engines that stand anywhere, also where they must not."""
    found, sizes = [], request.parallelism
    even = [gpus for gpus in range(1, sizes.world + 1) if find_shape(sizes, gpus, Nesting.REPLICAS)]
    for engine in draw(st.sets(st.integers(0, 5), max_size=3)):
        gpus = draw(st.sampled_from(even))
        if sizes.world // gpus <= len(names):
            nodes = draw(st.permutations([*names, "gone"]))[: sizes.world // gpus]
            found.append(Placed(request.fleet, engine, tuple(nodes), gpus, well=draw(st.integers(0, 4)) > 0))
    return found
