"""Ranks, given once pods have nodes: engines in order of where they stand, inside one tensor fastest, then pipeline, then data."""

from collections.abc import Iterable
from dataclasses import dataclass

from rolloutfleet_operator.plan.placement.result import FleetPlan
from rolloutfleet_operator.plan.placement.tree import Tree


@dataclass(frozen=True, slots=True)
class PodRanks:
    """One pod's ranks, consecutive in the group of the refit."""

    engine: int
    pod: int
    """0 is the leader."""
    node: str
    first: int
    """The first rank in the group."""
    local: int
    """The first rank in the engine: data x (TP x PP) + pipeline x TP + tensor."""
    count: int

    @property
    def ranks(self) -> range:
        """Of the group."""
        return range(self.first, self.first + self.count)


def order_engines(tree: Tree, plan: FleetPlan) -> tuple[int, ...]:
    """Engines by where their first pods stand, from the widest level down to the node, then by number."""
    places = {place.engine: tuple(tree.leaf[node] for node in place.nodes) for place in plan.engines}
    return tuple(sorted(places, key=lambda engine: (places[engine], engine)))


def plan_ranks(tree: Tree, plan: FleetPlan, first: int = 1) -> tuple[PodRanks, ...]:
    """The ranks of every pod that has a node, in order.

    Args:
        tree: that the plan was made on.
        plan: one fleet's.
        first: the first engine rank; trainers have those before it, or 0 for a trainer that comes last.
    """
    places = {place.engine: place for place in plan.engines}
    found, world = [], plan.request.parallelism.world
    for position, engine in enumerate(order_engines(tree, plan)):
        place, base = places[engine], first + position * world
        found += [
            PodRanks(engine, pod, node, base + pod * place.gpus, pod * place.gpus, place.gpus)
            for pod, node in enumerate(place.nodes)
        ]
    return tuple(found)


def locate(pods: Iterable[PodRanks]) -> dict[int, str]:
    """Rank of the group -> node."""
    return {rank: pod.node for pod in pods for rank in pod.ranks}
