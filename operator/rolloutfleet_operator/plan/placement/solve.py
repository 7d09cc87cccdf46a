"""The planner: nodes, fleets and what is placed -> a plan. Pure, and the same for any order of what it is given.

Engines that are well stay. The others are placed fleet by fleet, largest engines first, each engine where all of it fits and where it
breaks least. In all but the largest clusters, and there when engines are left over, it is tried in other ways: by requirements alone,
from the nodes with most room, fleets in another order. Small cases are then searched exactly (:mod:`search`). What is still missing is
explained.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, permutations

from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement.bound import most_engines
from rolloutfleet_operator.plan.placement.explain import explain_missing, impossible, note_nodes
from rolloutfleet_operator.plan.placement.kept import Standing, keep_engines, narrow_first
from rolloutfleet_operator.plan.placement.nodes import NodeFacts
from rolloutfleet_operator.plan.placement.pack import pack
from rolloutfleet_operator.plan.placement.request import AXES, Placed, PlacementRequest
from rolloutfleet_operator.plan.placement.result import EnginePlace, FleetPlan, Plan, Verdict
from rolloutfleet_operator.plan.placement.room import Room, restore
from rolloutfleet_operator.plan.placement.score import score_plan
from rolloutfleet_operator.plan.placement.search import BUDGET, Found, Search, Wanted
from rolloutfleet_operator.plan.placement.supply import Fit
from rolloutfleet_operator.plan.placement.task import Seat, Task, make_task
from rolloutfleet_operator.plan.placement.tree import build_tree


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is tried: seconds grow with each."""

    several_nodes: int = 2000
    """Up to so many nodes with room the best of several ways is taken; above, other ways are for engines that are left over."""
    exact_nodes: int = 48
    exact_engines: int = 16
    """Up to so many nodes with room, and engines, arrangements are searched exactly."""
    exact_steps: int = BUDGET


_LIMITS = Limits()
_ORDERS = 6
"""Orders of fleets that are tried when one of them is left without room."""
_DOMAINS = 64
"""Domains that are tried for a fleet that must, or had better, be in one."""


@dataclass(slots=True)
class _Share:
    """A fleet while it is planned."""

    task: Task
    standing: Standing
    missing: tuple[int, ...]
    impossible: str = ""

    @property
    def count(self) -> int:
        return 0 if self.impossible else len(self.missing)


def plan_placement(
    nodes: Iterable[NodeFacts],
    requests: Iterable[PlacementRequest],
    placed: Iterable[Placed] = (),
    limits: Limits = _LIMITS,
) -> Plan:
    """Where every engine goes.

    Args:
        nodes: all that may count; GPUs of the planned fleets' own pods are not among those that others use.
        requests: fleets of different names, with the same levels.
        placed: engines that have nodes.
        limits: how much is tried.

    Raises:
        InvalidSpecError: a request names a level that does not exist, contradicts itself or another one.
        ValueError: a node, or an engine that is placed, is listed twice.
    """
    asked = sorted(requests, key=lambda request: request.fleet)
    _check_together(asked)
    tree = build_tree(nodes, asked[0].levels) if asked else build_tree(nodes)
    empty, room, standing = Room(tree), Room(tree), list(placed)
    shares = []
    for request in asked:
        task = make_task(tree, request)
        kept = keep_engines(room, task, standing)
        missing = tuple(engine for engine in range(request.replicas) if engine not in kept.kept)
        shares.append(_Share(task, kept, missing, impossible(task) if missing else ""))
    found, proved = _Planner(room, shares, limits).run()
    for seats in found.seats:
        for seat in seats:
            room.take_all(seat.leaves, seat.gpus)
    plans = tuple(_fleet_plan(room, share, seats, proved) for share, seats in zip(shares, found.seats, strict=True))
    degraded = sum(len(place.degraded) for plan in plans for place in plan.engines)
    return Plan(tree, plans, score_plan(empty, room, degraded), note_nodes(tree))


def _check_together(asked: Sequence[PlacementRequest]) -> None:
    for before, after in pairwise(asked):
        if before.fleet == after.fleet:
            raise InvalidSpecError(f"fleet {after.fleet} is given twice; a plan needs one request for each fleet")
        if before.levels != after.levels:
            raise InvalidSpecError(
                f"placement.levels of the fleets {before.fleet} and {after.fleet} differ; fleets that are planned together share "
                "one tree, so give both the same levels"
            )


class _Planner:
    def __init__(self, room: Room, shares: Sequence[_Share], limits: Limits) -> None:
        self._room, self._shares, self._limits = room, shares, limits
        self._start = list(room.free)
        self._wanted = sum(share.count for share in shares)
        self._first = sorted(
            range(len(shares)), key=lambda index: (-shares[index].task.world, shares[index].task.request.fleet)
        )

    def run(self) -> tuple[Found, bool]:
        """The best arrangement, and whether more engines are certain not to fit; the room is as before."""
        best = self._greedy(self._first, Fit.WHOLE, preferring=True)
        several, small = self._sizes()
        spread = any(share.task.request.spread for share in self._shares if share.count)
        if not several and (best.worth[0] == self._wanted or self._bounded(best)):
            return best, True
        for other in self._others(several):
            if other.worth[:1] > best.worth[:1] or (not spread and other.worth > best.worth):
                best = other
            if not several and best.worth[0] == self._wanted:
                break
        # The search knows nothing of spreading, so that a fleet that spreads is searched only when it does not fit otherwise.
        if small and (best.worth[0] < self._wanted or not spread):
            search = Search(self._room, self._as_wanted(), best, self._limits.exact_steps)
            best = search.run()
            restore(self._room, self._start)
            return best, search.complete
        return best, best.worth[0] == self._wanted or self._bounded(best)

    def _others(self, several: bool) -> Iterator[Found]:
        ways = [(Fit.TIGHT, True), (Fit.WHOLE, False), (Fit.TIGHT, False), (Fit.LEVEL, False)]
        ways += [(Fit.LEVEL, True)] if several else []
        for fit, preferring in ways:
            yield self._greedy(self._first, fit, preferring=preferring)
        if sum(1 for share in self._shares if share.count) > 1:
            for order in islice(permutations(reversed(self._first)), _ORDERS):
                yield self._greedy(order, Fit.WHOLE, preferring=False)

    def _sizes(self) -> tuple[bool, bool]:
        """Whether the best of several ways is wanted, and whether the case is small enough to be searched."""
        tasks, limits = [share.task for share in self._shares if share.count], self._limits
        leaves = {leaf for task in tasks for product in task.products.values() for leaf in product if self._start[leaf]}
        small = len(leaves) <= limits.exact_nodes and self._wanted <= limits.exact_engines
        return self._wanted > 0 and len(leaves) <= limits.several_nodes, self._wanted > 0 and small

    def _as_wanted(self) -> list[Wanted]:
        return [Wanted(share.task, share.count, share.standing.within) for share in self._shares]

    def _greedy(self, order: Sequence[int], fit: Fit, *, preferring: bool) -> Found:
        room, seats = self._room, [tuple[Seat, ...]()] * len(self._shares)
        for index in order:
            if self._shares[index].count:
                seats[index] = self._fleet(self._shares[index], fit, preferring=preferring)
        missed = [0] * (len(AXES) - 1)
        for share, found in zip(self._shares, seats, strict=True):
            for seat in found:
                for axis, levels in enumerate(share.task.missed(seat)):
                    missed[axis] += levels
        pods = sum(len(seat.leaves) for found in seats for seat in found)
        worth = (sum(map(len, seats)), *(-each for each in missed), -pods, sum(room.whole_gpus()))
        restore(room, self._start)
        return Found(tuple(seats), worth)

    def _fleet(self, share: _Share, fit: Fit, *, preferring: bool) -> tuple[Seat, ...]:
        """Seats of one fleet, taken from the room; in the first domain that holds all of it, else in the one that holds most."""
        room, task, kept = self._room, share.task, tuple(share.standing.kept.values())
        before, best = list(room.free), list[Seat]()
        domains = narrow_first(room, task, share.standing) if preferring else list(share.standing.within)
        if len(domains) > 1:
            hold = {domain: most_engines(room, task, domain, share.count) for domain in domains}
            domains = sorted((d for d in domains if hold[d]), key=lambda domain: -(hold[domain] == share.count))
        for domain in domains[:_DOMAINS]:
            restore(room, before)
            found = pack(room, task, share.count, domain, fit, preferring=preferring, others=kept)
            if len(found) > len(best):
                best = found
            if len(found) == share.count:
                break
        restore(room, before)
        for seat in best:
            room.take_all(seat.leaves, seat.gpus)
        return tuple(best)

    def _bounded(self, found: Found) -> bool:
        """Whether each fleet that lacks engines has no room for more with all the other fleets' new engines out of its way."""
        for share, seats in zip(self._shares, found.seats, strict=True):
            if len(seats) < share.count and any(
                most_engines(self._room, share.task, within, share.count) > len(seats)
                for within in share.standing.within
            ):
                return False
        return True


def _fleet_plan(room: Room, share: _Share, seats: Sequence[Seat], proved: bool) -> FleetPlan:
    task = share.task
    places = [_place(task, engine, seat, kept=True) for engine, seat in share.standing.kept.items()]
    places += [_place(task, engine, seat, kept=False) for engine, seat in zip(share.missing, seats, strict=False)]
    missing = share.missing[len(seats) :]
    verdict = Verdict.PLACED
    message = ""
    if missing:
        verdict = Verdict.DOES_NOT_FIT if proved else Verdict.NOT_FOUND
        message = explain_missing(room, task, missing, _may_hold(share, seats), searched=proved)
    if share.impossible:
        verdict, message = Verdict.IMPOSSIBLE, share.impossible
    return FleetPlan(
        request=task.request,
        verdict=verdict,
        engines=tuple(sorted(places, key=lambda place: place.engine)),
        missing=missing,
        moved=tuple(sorted(share.standing.moved, key=lambda moved: moved.engine)),
        message=message,
    )


def _may_hold(share: _Share, seats: Sequence[Seat]) -> tuple[int, ...]:
    """The domains that may hold the fleet, now that these engines have seats."""
    tree, depth = share.task.tree, share.task.constraints.ladders["fleet"].required
    leaves = [leaf for seat in (*share.standing.kept.values(), *seats) for leaf in seat.leaves[:1]]
    return (tree.ancestor(leaves[0], depth),) if leaves else share.standing.within


def _place(task: Task, engine: int, seat: Seat, *, kept: bool) -> EnginePlace:
    tree = task.tree
    attained = task.attained(seat)
    degraded = []
    for axis in AXES[:-1]:
        rule, depth = task.request.rule(axis), attained[axis]
        if rule.preferred and task.constraints.ladders[axis].missed_by(depth):
            degraded.append(f"{axis} prefers {rule.preferred}, has {tree.level_name(depth)}")
    return EnginePlace(
        engine=engine,
        nodes=tuple(tree.node_at[leaf].name for leaf in seat.leaves),
        gpus=seat.gpus,
        kept=kept,
        domain=tree.title(tree.meeting(seat.leaves)),
        degraded=tuple(degraded),
    )
