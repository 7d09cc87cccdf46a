"""Every interleaving within bounds: all moments that can be reached, each once, and from each of them the way to rest."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from fakes.explored.acting import restart, start_sync, substitute, tell_roster
from fakes.explored.keys import key_of
from fakes.explored.moves import Move, calm_move, next_moves, open_session, request_refit, take
from fakes.explored.promises import AT_REST, PROMISES, has_enough_survivors
from fakes.explored.world import World
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_sync.protocol.model import TERMINAL, Refit

MOST_CALM_STEPS = 1500
"""No way to rest has more moves."""
MOST_CALM_SECONDS = 600.0


class BrokenPromiseError(AssertionError):
    """A promise does not hold; says which, and how it came to that."""

    def __init__(self, promise: str, what: str, trace: list[str]) -> None:
        self.promise = promise
        lines = "\n".join(f"  {number}. {name}" for number, name in enumerate(trace, 1))
        super().__init__(f"{promise}: {what}\n{lines}")


def check(before: World, after: World) -> tuple[str, str] | None:
    """The first promise that this step breaks, and how."""
    for promise in PROMISES:
        what = promise(before, after)
        if what:
            return promise.__name__, what
    return None


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a moment when nothing goes wrong any more."""

    steps: int
    seconds: float
    end: Refit | None
    """The refit that was under way, as it ended."""


@dataclass
class Exploration:
    """What was seen so far."""

    name: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    rests: int = 0
    longest_way_to_rest: int = 0
    seconds: float = 0.0
    complete: bool = True
    """Whether nothing within the bounds was left out."""
    came_from: dict[int, tuple[int, str]] = field(default_factory=dict)
    fates: dict[int, Fate] = field(default_factory=dict)
    recovered: set[int] = field(default_factory=set)

    def trace(self, at: int) -> list[str]:
        names: list[str] = []
        while at in self.came_from:
            at, name = self.came_from[at]
            names.append(name)
        return names[::-1]


def explore(
    name: str,
    start: World,
    *,
    depth: int,
    states: int = 10_000_000,
    seconds: float = float("inf"),
    liveness: bool = True,
) -> Exploration:
    """All moments within ``depth`` moves of the start; raises BrokenPromiseError at the first that breaks a promise.

    Ends early, and says so, when ``states`` or ``seconds`` are spent. Moments with more faults left come first, so that each is seen
    with as many as it can have, once.
    """
    begun = time.monotonic()
    seen = Exploration(name)
    first = hash(key_of(start))
    best: dict[int, tuple[int, int]] = {first: (start.faults, 0)}
    queues: list[deque[tuple[World, int, int]]] = [deque() for _ in range(start.faults + 1)]
    queues[start.faults].append((start, first, 0))
    while True:
        queue = next((each for each in reversed(queues) if each), None)
        if queue is None:
            break
        if seen.states >= states or time.monotonic() - begun > seconds:
            seen.complete = False
            break
        world, at, far = queue.popleft()
        seen.states += 1
        seen.depth = max(seen.depth, far)
        if liveness:
            come_to_rest(seen, world, at)
        if far >= depth:
            seen.complete = False
            continue
        for move in next_moves(world):
            after = _take(world, move, partial(seen.trace, at))
            seen.transitions += 1
            broken = check(world, after)
            if broken is not None:
                raise BrokenPromiseError(*broken, [*seen.trace(at), move.name])
            key = hash(key_of(after))
            if key in best:
                continue
            best[key] = (after.faults, far + 1)
            seen.came_from[key] = (at, move.name)
            queues[after.faults].append((after, key, far + 1))
    seen.seconds = time.monotonic() - begun
    return seen


def _take(world: World, move: Move, trace: Callable[[], list[str]]) -> World:
    """The moment after; that the state machine can take the step at all is a promise too."""
    try:
        return take(world, move)
    except Exception as error:
        raise BrokenPromiseError("every_step_can_be_taken", repr(error), [*trace(), move.name]) from error


# Liveness.


def come_to_rest(seen: Exploration, world: World, at: int) -> Fate:
    """Follow the calm way until it is known where it leads, and remember that for all of it."""
    if at in seen.fates:
        return seen.fates[at]
    way: list[tuple[int, World]] = []
    known: dict[int, int] = {}
    names: list[str] = []
    here, key = world, at
    while key not in seen.fates and key not in known:
        if len(way) > MOST_CALM_STEPS:
            raise BrokenPromiseError("the_system_comes_to_rest", "it does not", [*seen.trace(at), "CALM", *names])
        known[key] = len(way)
        way.append((key, here))
        move = calm_move(here)
        after = _take(here, move, lambda: [*seen.trace(at), "CALM", *names])
        names.append(move.name)
        broken = check(here, after)
        if broken is not None:
            raise BrokenPromiseError(*broken, [*seen.trace(at), "CALM", *names])
        here, key = after, hash(key_of(after))
    if key in known:
        circle = way[known[key] :]
        _check_rest(seen, circle, [*seen.trace(at), "CALM", *names])
        for each, moment in circle:
            seen.fates[each] = Fate(0, 0.0, None)
            del moment
        way = way[: known[key]]
    later, fate = here, seen.fates[key]
    for each, moment in reversed(way):
        running = moment.active
        end = fate.end
        if running is None:
            end = None
        elif later.active is None or later.active.id != running.id:
            last = later.state.refit
            end = last if last is not None and last.id == running.id and last.phase in TERMINAL else None
        fate = Fate(fate.steps + 1, fate.seconds + later.now - moment.now, end)
        if has_enough_survivors(moment) and (end is None or not end.committed):
            what = f"in {moment.active and moment.active.phase} it ends {end and end.problem}"
            raise BrokenPromiseError("a_refit_with_enough_survivors_completes", what, [*seen.trace(at), "CALM", *names])
        seen.fates[each] = fate
        seen.longest_way_to_rest = max(seen.longest_way_to_rest, fate.steps)
        if fate.seconds > MOST_CALM_SECONDS:
            raise BrokenPromiseError("the_system_comes_to_rest", f"it takes {fate.seconds} s", seen.trace(at))
        later = moment
    return seen.fates[at]


def _check_rest(seen: Exploration, circle: list[tuple[int, World]], trace: list[str]) -> None:
    """A moment that comes again and again is rest, and keeps the promises of rest."""
    seen.rests += 1
    key, world = circle[0]
    for _, moment in circle:
        if moment.active is not None:
            raise BrokenPromiseError("every_refit_ends", f"{moment.active.phase} again and again", trace)
    for promise in AT_REST:
        what = promise(world)
        if what:
            raise BrokenPromiseError(promise.__name__, what, trace)
    _recover(seen, world, key, trace)


def _recover(seen: Exploration, world: World, key: int, trace: list[str]) -> None:
    """Every engine comes back and a new trainer gives the fleet a version: all serve it, or the promise is broken."""
    if key in seen.recovered:
        return
    seen.recovered.add(key)
    world = replace(world, refits_left=0, faults=0)
    if world.revision != world.known_revision:
        world = start_sync(world)  # at its next write it would find out that somebody else has written
        while world.reads:
            world = take(world, calm_move(world))
    for engine in world.engines:
        if engine.leaving:
            world = substitute(world, engine, same_address=False)
        elif not engine.alive:
            world = restart(world, engine)
    world = open_session(tell_roster(world), take_over=True)
    world = request_refit(world)
    trainer = world.trainer
    if trainer is None or not trainer.refit:
        raise BrokenPromiseError("a_new_refit_completes", "the sync job refuses it", trace)
    refit, names = trainer.refit, []
    for _ in range(MOST_CALM_STEPS):
        move = calm_move(world)
        after = _take(world, move, lambda: [*trace, "RECOVERY", *names])
        names.append(move.name)
        broken = check(world, after)
        if broken is not None:
            raise BrokenPromiseError(*broken, [*trace, "RECOVERY", *names])
        world = after
        last = world.state.refit
        if last is None or last.id != refit or last.phase not in TERMINAL:
            continue
        if last.phase is not Phase.COMPLETE:
            raise BrokenPromiseError("a_new_refit_completes", f"{last.problem}", [*trace, "RECOVERY", *names])
        if all(each.serves and each.fence.version == last.version for each in world.engines):
            return
    raise BrokenPromiseError(
        "a_new_refit_completes", "not every engine comes to serve it", [*trace, "RECOVERY", *names]
    )
