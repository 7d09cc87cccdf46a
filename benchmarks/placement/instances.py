"""Random small cases: a few racks of a few nodes, partly used, and fleets that may or may not fit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet_operator.plan.placement.nodes import PRODUCT_LABEL, NodeFacts, OtherPod, Taint
from rolloutfleet_operator.plan.placement.request import PlacementRequest, Rule
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.tree import HOST, Level

LEVELS = (Level("block", "example.com/block"), Level("rack", "example.com/rack"), HOST)
_SIZES = (
    Parallelism(),
    Parallelism(2),
    Parallelism(4),
    Parallelism(8),
    Parallelism(2, 2),
    Parallelism(4, 2),
    Parallelism(8, 2),
    Parallelism(2, 1, 4),
    Parallelism(4, 1, 16),
    Parallelism(1, 1, 4),
    Parallelism(3),
    Parallelism(2, 2, 4),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One cluster and the fleets that want room in it."""

    nodes: tuple[NodeFacts, ...]
    requests: tuple[PlacementRequest, ...]


def make_case(seed: int) -> Case:
    """The case of a seed. Everything is required and nothing preferred, so that the optimum is one number."""
    chance = random.Random(seed)
    nodes = []
    mixed = chance.random() < 0.3
    for block in range(chance.randint(1, 2)):
        for rack in range(chance.randint(1, 3)):
            small = mixed and chance.random() < 0.5
            nodes += [_node(chance, block, rack, index, small=small) for index in range(chance.randint(1, 4))]
    chance.shuffle(nodes)
    requests = tuple(_request(chance, name) for name in ("a", "b")[: chance.choice((1, 1, 1, 2))])
    return Case(tuple(nodes), requests)


def _node(chance: random.Random, block: int, rack: int, index: int, *, small: bool) -> NodeFacts:
    gpus = 4 if small else 8
    labels = {PRODUCT_LABEL: "GB200" if small else "H100", "example.com/block": f"b{block}"}
    if chance.random() > 0.08:
        labels["example.com/rack"] = f"b{block}-r{rack}"
    name = f"b{block}-r{rack}-n{index}"
    used = chance.choice((0, 0, 0, 1, 2, 4, 6, gpus))
    others = (OtherPod(f"other/{name}", min(used, gpus)),) if used else ()
    taints = (Taint("example.com/held"),) if chance.random() < 0.05 else ()
    return NodeFacts(
        name, gpus, labels, others, taints, cordoned=chance.random() < 0.05, quarantined=chance.random() < 0.03
    )


def _request(chance: random.Random, fleet: str) -> PlacementRequest:
    sizes = chance.choice(_SIZES)
    deep: Sequence[str] = ("host", "rack", "block", "cluster")
    tensor = chance.choice(deep[:3] if sizes.tensor > 1 else deep[:1])
    wide = chance.choice(deep[1:])
    rules = {
        "tensor": Rule(tensor),
        "expert": Rule(chance.choice(deep[1:])),
        "pipeline": Rule(chance.choice(deep[1:])),
        "engine": Rule(wide),
        "fleet": Rule(chance.choice(("cluster", "cluster", "block", "rack"))),
    }
    per_node = chance.choice((None, None, 4, 8)) if sizes.world % 4 == 0 and sizes.tensor != 3 else None
    return PlacementRequest(fleet, chance.randint(1, 6), sizes, LEVELS, rules, gpus_per_node=per_node)
