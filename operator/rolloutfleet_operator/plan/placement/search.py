"""An exact search for small cases: every arrangement of the engines, up to exchanging what is alike, within a budget of steps.

States are compared by a signature that forgets names, so racks that hold the same are one rack, and orders of equal engines are one order.
It is for what the greedy misses, and to find the arrangement that leaves most whole domains; whether it looked at everything is part of its
answer, and without that nothing is said to be impossible.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, mul

from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.supply import Kind
from rolloutfleet_operator.plan.placement.task import Seat, Task

BUDGET = 40_000
"""Steps: one for a domain or a partial arrangement of an engine, ten for an engine that is tried; a hundredth of a millisecond each."""
_TRY = 10


@dataclass(frozen=True, slots=True)
class Wanted:
    """Engines of one fleet that are to be placed."""

    task: Task
    count: int
    withins: tuple[int, ...] = (0,)
    """The domains that may hold the fleet, one of which does."""


@dataclass(frozen=True, slots=True)
class Found:
    """An arrangement, as good as ``worth`` says."""

    seats: tuple[tuple[Seat, ...], ...]
    """For each wanted fleet."""
    worth: tuple[int, ...]
    """Engines placed, levels missed (negative, in order of care), pods (negative), GPUs left in whole domains."""


class _Spent(Exception):  # noqa: N818 - it ends the search, nothing has failed
    """The budget is spent."""


class Search:
    """Looks for something better than an incumbent."""

    def __init__(self, room: Room, wanted: Sequence[Wanted], incumbent: Found, budget: int = BUDGET) -> None:
        self._room, self._tree, self._wanted = room, room.tree, wanted
        self.best = incumbent
        self.complete = True
        """Whether everything was looked at; then the best is the optimum."""
        self._left = budget
        self._numbers: dict[tuple[object, ...], int] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._chosen: list[list[Seat]] = [[] for _ in wanted]
        self._kinds = [task.task.kinds(task.task.constraints.loosest) for task in wanted]
        self._static = {
            leaf: tuple(leaf in each for task in wanted for each in task.task.products.values())
            for leaf in self._tree.leaves()
        }
        self._need = [each.task.world for each in wanted]
        self._least = [min((kind.shape.pods for kind in kinds), default=0) for kinds in self._kinds]
        """Pods of an engine."""

    def run(self) -> Found:
        """The best that was found, the incumbent when nothing is better."""
        try:
            self._fleet(0, 0, (0,) * 5)
        except _Spent:
            self.complete = False
        return self.best

    def spend(self, steps: int) -> None:
        """Take steps from the budget; raises when it is spent."""
        self._left -= steps
        if self._left < 0:
            raise _Spent

    def _fleet(self, index: int, placed: int, spent: tuple[int, ...]) -> None:
        if index == len(self._wanted):
            self._offer(placed, spent)
            return
        for within in self._wanted[index].withins:
            self._engine(index, within, self._wanted[index].count, placed, spent)

    def _offer(self, placed: int, spent: tuple[int, ...]) -> None:
        worth = (placed, *(-each for each in spent), sum(self._room.whole_gpus()))
        if worth > self.best.worth:
            self.best = Found(tuple(tuple(seats) for seats in self._chosen), worth)

    def _engine(self, index: int, within: int, left: int, placed: int, spent: tuple[int, ...]) -> None:
        """Place the next engine in every way; ``spent`` counts the levels missed by axis, and pods."""
        if not left:
            self._fleet(index + 1, placed, spent)
            return
        more = left + sum(each.count for each in self._wanted[index + 1 :])
        if self._hopeless(index, left, placed + more, spent):
            return
        signs = self._signs()
        state = (index, within, left, placed, spent, signs[0])
        if state in self._seen:
            return
        self._seen.add(state)
        options = sorted(self._options(index, within, signs))
        for _, leaves, gpus, price in options:
            self.spend(_TRY)
            seat = Seat(leaves, gpus)
            self._room.take_all(leaves, gpus)
            self._chosen[index].append(seat)
            self._engine(index, within, left - 1, placed + 1, tuple(map(add, spent, price)))
            self._chosen[index].pop()
            self._room.take_all(leaves, -gpus)
        if placed + more - 1 >= self.best.worth[0]:
            self._fleet(index + 1, placed, spent)

    def _hopeless(self, index: int, left: int, most: int, spent: tuple[int, ...]) -> bool:
        """Whether nothing from here on can be better than the best."""
        if most != self.best.worth[0]:
            return most < self.best.worth[0]
        counts = (left, *(each.count for each in self._wanted[index + 1 :]))
        need, pods = (sum(map(mul, counts, each[index:])) for each in (self._need, self._least))
        whole = self._room.whole_gpus()
        free = self._room.free[0]
        ceiling = sum(gpus - max(0, need - (free - gpus)) for gpus in whole)
        return (most, *(-each for each in spent[:-1]), -spent[-1] - pods, ceiling) <= self.best.worth

    def _number(self, parts: tuple[object, ...]) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))

    def _leaf_sign(self, leaf: int, free: int) -> int:
        return self._number((free, self._room.total[leaf], self._static[leaf]))

    def _signs(self) -> list[int]:
        """The signature of every domain."""
        tree = self._tree
        signs = [0] * len(tree.parent)
        for domain in range(len(signs) - 1, -1, -1):
            if domain in self._static:
                signs[domain] = self._leaf_sign(domain, self._room.free[domain])
            else:
                signs[domain] = self._number(("in", *sorted(signs[child] for child in tree.children[domain])))
        return signs

    def _options(
        self, index: int, within: int, signs: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
        """Seats for one engine that differ in more than names: how good they are, nodes, GPUs of each pod, levels missed and pods."""
        task, tree, before = self._wanted[index].task, self._tree, sum(self._room.whole_gpus())
        for kind in self._kinds[index]:
            seen, ways = set(), _Ways(self, kind, signs)
            for domain in tree.at_depth(max(kind.bounds.engine, tree.depth[within]), within):
                # What lies around a domain tells it from another that holds the same.
                around = tuple(signs[each] for each in tree.path(domain))
                if around in seen:
                    continue
                seen.add(around)
                self.spend(1)
                for leaves in ways.of(domain, kind.shape.middles).values():
                    seat = task.seat(kind, list(leaves))
                    miss = task.missed(seat)
                    self._room.take_all(seat.leaves, seat.gpus)
                    lost = before - sum(self._room.whole_gpus())
                    self._room.take_all(seat.leaves, -seat.gpus)
                    price = (*miss, len(leaves))
                    yield (*price, lost), seat.leaves, seat.gpus, price


class _Ways:
    """Ways of taking units from a domain, one for each outcome that is different."""

    def __init__(self, search: Search, kind: Kind, signs: Sequence[int]) -> None:
        self._search, self._kind, self._signs = search, kind, signs
        self._tree, self._room = search._tree, search._room
        self._admitted = frozenset(kind.leaves)
        self._per = [1] * (self._tree.hosts + 1)
        self._per[kind.bounds.tensor] *= kind.shape.tensor_pods
        self._per[kind.bounds.middle] *= kind.shape.middle_tensors
        self._counts: dict[int, int] = {}

    def _count(self, domain: int) -> int:
        if domain not in self._counts:
            at = self._tree.depth[domain]
            if at == self._tree.hosts:
                fits = domain in self._admitted and self._room.free[domain] >= self._kind.shape.gpus
                self._counts[domain] = int(fits)
            else:
                inside = sum(self._count(child) for child in self._tree.children[domain])
                self._counts[domain] = inside // self._per[at]
        return self._counts[domain]

    def of(self, domain: int, units: int) -> dict[int, tuple[int, ...]]:
        """Signature after -> nodes, listed by middle unit."""
        if not units:
            return {self._signs[domain]: ()}
        if units > self._count(domain):
            return {}
        tree, at = self._tree, self._tree.depth[domain]
        number = self._search._number
        if at == tree.hosts:
            return {self._search._leaf_sign(domain, self._room.free[domain] - self._kind.shape.gpus): (domain,)}
        inside = units * self._per[at]
        children = tree.children[domain]
        after = [0] * (len(children) + 1)
        for position in range(len(children) - 1, -1, -1):
            after[position] = after[position + 1] + self._count(children[position])
        partial: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {(0, ()): ()}
        for position, child in enumerate(children):
            following: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
            for (taken, signs), leaves in partial.items():
                least = max(0, inside - taken - after[position + 1])
                for more in range(least, min(self._count(child), inside - taken) + 1):
                    for sign, chosen in self.of(child, more).items():
                        following.setdefault((taken + more, tuple(sorted((*signs, sign)))), (*leaves, *chosen))
            self._search.spend(len(following))
            partial = following
        return {number(("in", *signs)): leaves for (taken, signs), leaves in partial.items() if taken == inside}
