"""Clusters and fleets of the benchmark, by seed: racks of nodes with eight GPUs, partly held by others."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rolloutfleet_operator.plan.placement.nodes import PRODUCT_LABEL, NodeFacts, OtherPod
from rolloutfleet_operator.plan.placement.request import PlacementRequest, Rule
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.tree import HOST, Level

BLOCK = Level("block", "network.topology.nvidia.com/spine")
RACK = Level("rack", "network.topology.nvidia.com/leaf")
LEVELS = (BLOCK, RACK, HOST)
GPUS = 8
RACKS_PER_BLOCK, NODES_PER_RACK = 8, 8
_ENGINES = (
    Parallelism(2),
    Parallelism(4),
    Parallelism(8),
    Parallelism(8, 2),
    Parallelism(8, 4),
    Parallelism(4, 1, 16),
    Parallelism(8, 1, 32),
    Parallelism(8, 1, 64),
)
"""1, 1, 1, 2, 4, 2, 4 and 8 pods."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A cluster, and the fleets that come to it one after another."""

    nodes: tuple[NodeFacts, ...]
    fleets: tuple[PlacementRequest, ...]

    @property
    def engines(self) -> int:
        """Engines wanted."""
        return sum(fleet.replicas for fleet in self.fleets)


def make_nodes(count: int, chance: random.Random, held: float) -> tuple[NodeFacts, ...]:
    """So many nodes, of which a share is partly held by others' pods."""
    return tuple(_node(index, chance.choice((1, 2, 4, 8)) if chance.random() < held else 0) for index in range(count))


def _node(index: int, used: int) -> NodeFacts:
    rack = index // NODES_PER_RACK
    labels = {
        HOST.label: f"node-{index}",
        BLOCK.label: f"block-{rack // RACKS_PER_BLOCK}",
        RACK.label: f"rack-{rack}",
        PRODUCT_LABEL: "NVIDIA-H100-80GB-HBM3",
    }
    others = (OtherPod(f"others/pod-{index}", used),) if used else ()
    return NodeFacts(f"node-{index}", GPUS, labels, others)


def make_arrivals(seed: int, fill: float, nodes: int = 256) -> Arrivals:
    """Fleets that, with what others hold, ask for that share of a cluster's GPUs."""
    chance = random.Random(seed)
    cluster = make_nodes(nodes, chance, held=0.2)
    left = int(fill * nodes * GPUS) - sum(node.used_by_others for node in cluster)
    return Arrivals(cluster, tuple(_fleets(chance, left)))


def _fleets(chance: random.Random, left: int) -> Iterator[PlacementRequest]:
    smallest, index = min(sizes.world for sizes in _ENGINES), 0
    while left >= smallest:
        sizes = chance.choice([sizes for sizes in _ENGINES if sizes.world <= left])
        replicas = min(chance.randint(1, 6), left // sizes.world)
        left -= replicas * sizes.world
        yield make_fleet(f"fleet-{index:03}", replicas, sizes)
        index += 1


def make_fleet(name: str, replicas: int, sizes: Parallelism) -> PlacementRequest:
    """Each engine in one rack, each tensor group on one node, pods that fill nodes."""
    rules = {"tensor": Rule("host"), "engine": Rule("rack")}
    return PlacementRequest(name, replicas, sizes, LEVELS, rules, gpus_per_node=GPUS)


def hold(nodes: tuple[NodeFacts, ...], held: dict[str, int]) -> tuple[NodeFacts, ...]:
    """The nodes with so many more GPUs held."""
    return tuple(
        replace(node, others=(*node.others, OtherPod("fleets/engine", held[node.name])))
        if held.get(node.name)
        else node
        for node in nodes
    )
