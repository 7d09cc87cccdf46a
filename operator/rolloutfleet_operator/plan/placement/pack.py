"""Greedy placement of a fleet's engines, one after another, each only where all of it fits."""

from collections.abc import Iterable, Mapping, Sequence

from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.supply import Fit, Key, Supply
from rolloutfleet_operator.plan.placement.task import Seat, Task, could_hold
from rolloutfleet_operator.plan.placement.tree import Tree


def pack(
    room: Room, task: Task, count: int, within: int, fit: Fit, *, preferring: bool = True, others: Iterable[Seat] = ()
) -> list[Seat]:
    """Seats for up to ``count`` engines; ``room`` is left as they leave it.

    Args:
        room: free GPUs.
        task: the fleet.
        count: engines wanted.
        within: the domain that holds the fleet.
        fit: how to choose among domains.
        preferring: whether preferences count, or requirements alone.
        others: the fleet's engines that have seats already, for spreading.
    """
    found: list[Seat] = []
    spread = Spread(task.tree, task.constraints.spread, within, others) if task.constraints.spread else None
    for kinds in task.steps(within, preferring=preferring):
        if len(found) >= count:
            break
        hopeful = [kind for kind in kinds if could_hold(kind, room, within)]
        supplies = [Supply(room, kind, within, fit) for kind in hopeful]
        while len(found) < count and (chosen := _choose(supplies, within, spread)):
            supply, domain = chosen
            seat = task.seat(supply.kind, supply.pick(domain))
            for leaf in seat.leaves:
                room.take(leaf, seat.gpus)
            for leaf in seat.leaves:
                for each in supplies:
                    each.refresh(leaf)
            if spread:
                spread.add(seat)
            found.append(seat)
    return found


class Spread:
    """How many engines stand in each domain of the level that they spread over."""

    def __init__(self, tree: Tree, depth: int, within: int, seats: Iterable[Seat]) -> None:
        self._tree, self.depth = tree, max(depth, tree.depth[within])
        self._engines = dict.fromkeys(tree.at_depth(self.depth, within), 0)
        for seat in seats:
            self.add(seat)

    def add(self, seat: Seat) -> None:
        """One more engine, counted once in each domain that it reaches into."""
        for domain in {self._tree.ancestor(leaf, self.depth) for leaf in seat.leaves}:
            if domain in self._engines:
                self._engines[domain] += 1

    @property
    def engines(self) -> Mapping[int, int]:
        """Engines by domain."""
        return self._engines


def _choose(supplies: Sequence[Supply], within: int, spread: Spread | None) -> tuple[Supply, int] | None:
    """The supply to take from, and the domain; None when none holds an engine."""
    best: tuple[int, Key, int] | None = None
    for index, supply in enumerate(supplies):
        for engines, key in _offers(supply, within, spread):
            if best is None or (engines, key, index) < best:
                best = (engines, key, index)
    return (supplies[best[2]], best[1][-1]) if best else None


def _offers(supply: Supply, within: int, spread: Spread | None) -> Iterable[tuple[int, Key]]:
    if spread is None or supply.depth < spread.depth:
        key = supply.best(within)
        return () if key is None else ((0, key),)
    return [(engines, key) for domain, engines in spread.engines.items() if (key := supply.best(domain)) is not None]
