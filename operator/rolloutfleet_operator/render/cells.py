"""What each GPU of a planned cluster is used for, and which domains are worth a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolloutfleet_operator.plan.placement.result import Plan


class Use(StrEnum):
    """Of one GPU."""

    FREE = "free"
    ENGINE = "engine"
    OTHER = "other pods"
    CLOSED = "closed node"


@dataclass(frozen=True, slots=True)
class Cell:
    """One GPU."""

    use: Use
    fleet: str = ""
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Box:
    """The nodes of one domain just above single nodes, by name."""

    domain: int
    title: str
    nodes: tuple[tuple[str, tuple[Cell, ...]], ...]

    @property
    def has_engine(self) -> bool:
        """Whether any engine stands here."""
        return any(cell.use is Use.ENGINE for _, cells in self.nodes for cell in cells)


def draw_boxes(plan: Plan) -> tuple[Box, ...]:
    """Every domain just above single nodes, in order, with each node's GPUs: engines first, then others, then free ones."""
    tree = plan.tree
    engines = _engines(plan)
    boxes = []
    for domain in tree.at_depth(tree.hosts - 1):
        nodes = []
        for leaf in tree.leaves(domain):
            node = tree.node_at[leaf]
            held = [
                Cell(Use.ENGINE, fleet, engine)
                for fleet, engine, gpus in engines.get(node.name, ())
                for _ in range(gpus)
            ]
            held += [Cell(Use.OTHER)] * min(node.used_by_others, max(0, node.gpus - len(held)))
            rest = Cell(Use.FREE if node.usable else Use.CLOSED)
            nodes.append((node.name, tuple(held + [rest] * (node.gpus - len(held)))))
        above = " / ".join(tree.title(each) for each in tree.path(domain)) or tree.title(domain)
        boxes.append(Box(domain, above, tuple(nodes)))
    return tuple(boxes)


def _engines(plan: Plan) -> Mapping[str, Sequence[tuple[str, int, int]]]:
    found: dict[str, list[tuple[str, int, int]]] = {}
    for fleet in plan.fleets:
        for place in fleet.engines:
            for node in place.nodes:
                found.setdefault(node, []).append((fleet.request.fleet, place.engine, place.gpus))
    return found
