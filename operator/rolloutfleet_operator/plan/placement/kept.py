"""Which engines stay where they are: those that are well and inside their required domains."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rolloutfleet_operator.plan.placement.request import AXES, Placed
from rolloutfleet_operator.plan.placement.result import Moved
from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.shape import Nesting, find_shape
from rolloutfleet_operator.plan.placement.task import Seat, Task


@dataclass(slots=True)
class Standing:
    """Engines of a fleet: those that stay, and why others cannot."""

    kept: dict[int, Seat] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    within: tuple[int, ...] = (0,)
    """Domains that may hold the fleet."""


def keep_engines(room: Room, task: Task, placed: Iterable[Placed]) -> Standing:
    """The engines that stay; their GPUs are taken from the room.

    Raises:
        ValueError: an engine is listed twice.
    """
    standing = Standing()
    mine = sorted((each for each in placed if each.fleet == task.request.fleet), key=lambda each: each.engine)
    seats: dict[int, Seat] = {}
    for each in mine:
        if each.engine in seats or any(each.engine == moved.engine for moved in standing.moved):
            raise ValueError(f"fleet {each.fleet}: engine {each.engine} is placed twice")
        if each.engine >= task.request.replicas:
            continue
        if reason := _fault(room, task, each):
            standing.moved.append(Moved(each.engine, reason))
            continue
        seats[each.engine] = Seat(tuple(task.tree.leaf[name] for name in each.nodes), each.gpus)
        for leaf in seats[each.engine].leaves:
            if task.tree.node_at[leaf].usable:
                room.take(leaf, each.gpus)
    _choose_domain(room, task, seats, standing)
    standing.kept = seats
    return standing


def _fault(room: Room, task: Task, placed: Placed) -> str:
    """Why an engine cannot stay; empty when it can."""
    tree, sizes = task.tree, task.request.parallelism
    if not placed.well:
        return "it is not well"
    if gone := [name for name in placed.nodes if name not in tree.leaf]:
        return f"node {gone[0]} is gone"
    wanted = task.request.gpus_per_node
    if wanted is not None and placed.gpus != min(wanted, sizes.world):
        return f"its pods have {placed.gpus} GPUs each, and parallelism.gpusPerNode is {wanted}"
    shape = find_shape(sizes, placed.gpus, Nesting.REPLICAS)
    if shape is None or shape.pods != len(placed.nodes) or len(set(placed.nodes)) != len(placed.nodes):
        return f"it has {len(placed.nodes)} pods of {placed.gpus} GPUs, and {sizes} does not divide like that over as many nodes"
    for name in placed.nodes:
        node = tree.node_at[tree.leaf[name]]
        if not node.ready:
            return f"node {name} is not Ready"
        have = room.free[tree.leaf[name]] if node.usable else node.gpus - node.used_by_others
        if have < placed.gpus:
            return f"node {name} has {max(0, have)} GPUs for it, and it needs {placed.gpus}"
    seat = Seat(tuple(tree.leaf[name] for name in placed.nodes), placed.gpus)
    attained = task.attained(seat)
    for axis in AXES[:-1]:
        required = task.constraints.ladders[axis].required
        if attained[axis] < required:
            return f"its {axis} group is not in one {tree.level_name(required)} any more"
    fleet = task.constraints.ladders["fleet"].required
    if attained["engine"] < fleet:
        return f"it is not in one {tree.level_name(fleet)}, as the whole fleet must be"
    return ""


def _choose_domain(room: Room, task: Task, seats: dict[int, Seat], standing: Standing) -> None:
    """Where the whole fleet must be in one domain, the one that holds most of its engines; the others move there."""
    depth, tree = task.constraints.ladders["fleet"].required, task.tree
    if not depth:
        return
    homes = {engine: tree.ancestor(seat.leaves[0], depth) for engine, seat in seats.items()}
    counts = Counter(homes.values())
    if not counts:
        standing.within = tuple(tree.at_depth(depth))
        return
    home = min(counts, key=lambda domain: (-counts[domain], domain))
    standing.within = (home,)
    for engine in [engine for engine, where in homes.items() if where != home]:
        seat = seats.pop(engine)
        for leaf in seat.leaves:
            if tree.node_at[leaf].usable:
                room.take(leaf, -seat.gpus)
        standing.moved.append(Moved(engine, f"it is outside {tree.title(home)}, which holds the fleet's others"))


def narrow_first(room: Room, task: Task, standing: Standing) -> list[int]:
    """Domains to try for the whole fleet, best first: preferred levels from narrow to wide, at each those in use first, the tightest of
    them before the others.
    """
    ladder, tree = task.constraints.ladders["fleet"], task.tree
    found: list[int] = []
    leaves = [leaf for seat in standing.kept.values() for leaf in seat.leaves]
    for depth in ladder.steps():
        if leaves:
            meeting = tree.meeting(leaves)
            domains = [tree.ancestor(meeting, depth)] if tree.depth[meeting] >= depth else []
        else:
            domains = sorted(tree.at_depth(depth), key=lambda domain: (room.whole(domain), room.free[domain], domain))
        found += [domain for domain in domains if domain not in found]
    return [
        domain
        for domain in found
        if any(
            tree.ancestor(domain, tree.depth[top]) == top
            for top in standing.within
            if tree.depth[top] <= tree.depth[domain]
        )
    ]
