"""What each GPU of a planned cluster is used for, and which domains are worth a picture."""

from dataclasses import dataclass
from enum import StrEnum

from rolloutfleet_operator.plan.placement.result import Plan
from rolloutfleet_operator.plan.placement.tree import Tree


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
    number: int = 0
    """Of the engine among those of all fleets."""


@dataclass(frozen=True, slots=True)
class Box:
    """Nodes that are known to share a domain and none narrower, by name."""

    title: str
    nodes: tuple[tuple[str, tuple[Cell, ...]], ...]

    @property
    def has_engine(self) -> bool:
        """Whether any engine stands here."""
        return any(cell.use is Use.ENGINE for _, cells in self.nodes for cell in cells)


def draw_boxes(plan: Plan) -> tuple[Box, ...]:
    """Every domain that is the narrowest known one of some nodes, in order, with each node's GPUs: of engines, others, and free."""
    tree, cells = plan.tree, _engine_cells(plan)
    by_home: dict[int, list[tuple[str, tuple[Cell, ...]]]] = {}
    for leaf in tree.leaves():
        node = tree.node_at[leaf]
        held = cells.get(node.name, [])
        held = held + [Cell(Use.OTHER)] * min(node.used_by_others, max(0, node.gpus - len(held)))
        rest = Cell(Use.FREE if node.usable else Use.CLOSED)
        by_home.setdefault(tree.home(leaf), []).append((node.name, tuple(held + [rest] * (node.gpus - len(held)))))
    return tuple(Box(_words(tree, home), tuple(nodes)) for home, nodes in sorted(by_home.items()))


def _words(tree: Tree, home: int) -> str:
    return " / ".join(tree.title(each) for each in tree.path(home) if tree.known[each]) or tree.title(home)


def number_engines(plan: Plan) -> dict[tuple[str, int], int]:
    """Fleet and engine -> the engine's number among those of all fleets, from 0."""
    engines = [(fleet.request.fleet, place.engine) for fleet in plan.fleets for place in fleet.engines]
    return {engine: number for number, engine in enumerate(engines)}


def _engine_cells(plan: Plan) -> dict[str, list[Cell]]:
    """The cells that engines use, by node."""
    found: dict[str, list[Cell]] = {}
    numbers = number_engines(plan)
    for fleet in plan.fleets:
        name = fleet.request.fleet
        for place in fleet.engines:
            cell = Cell(Use.ENGINE, name, place.engine, numbers[name, place.engine])
            for node in place.nodes:
                found.setdefault(node, []).extend([cell] * place.gpus)
    return found
