"""What is explored: fleets of one to three engines, from different beginnings, each with a bound on what goes wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fakes.explored.acting import kill, make_world, substitute
from fakes.explored.explorer import Exploration, explore
from fakes.explored.moves import calm_move, open_session, request_refit, take
from fakes.explored.world import IN_PLACE, STAGED, World
from rolloutfleet.contract.policy import PauseMode, RefitPolicy, RollingPolicy, Strategy

WAITING = STAGED.model_copy(update={"pause": PauseMode.WAIT})
PAIR = IN_PLACE.model_copy(update={"min_ready": 2})
ROLLING = STAGED.model_copy(
    update={"strategy": Strategy.ROLLING, "rolling": RollingPolicy(max_unavailable=1, max_stale_seconds=60)}
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A beginning, and how much goes wrong from there."""

    name: str
    engines: int
    policy: RefitPolicy
    faults: int
    begin: Callable[[World], World]
    refits: int = 1

    def start(self) -> World:
        """The first moment."""
        world = self.begin(make_world(self.engines, self.policy))
        return replace(world, refits_left=self.refits, faults=self.faults)

    def explore(self, *, depth: int, states: int, seconds: float = float("inf")) -> Exploration:
        """All moments within these bounds."""
        return explore(self.name, self.start(), depth=depth, states=states, seconds=seconds)


def settled(world: World) -> World:
    """Every engine serves and a trainer has come."""
    return open_session(_rest(world))


def second(world: World) -> World:
    """A refit has completed; its group is kept for the next."""
    return _rest(request_refit(settled(world)))


def late(world: World) -> World:
    """A refit has completed, and one engine was replaced since: it waits for the version."""
    world = second(world)
    victim = world.engines[-1]
    world = kill(world, victim)
    return substitute(world, world.engines[-1], same_address=False)


def _rest(world: World) -> World:
    for _ in range(400):
        move = calm_move(world)
        if move.name == "time passes" and world.active is None and all(each.serves for each in world.engines):
            return world
        world = take(world, move)
    raise AssertionError("the fleet does not come up")


BOUNDED = (
    Scenario("one engine, in place", 1, IN_PLACE, 1, settled),
    Scenario("one engine, staged", 1, STAGED, 1, settled),
    Scenario("one engine, staged, requests finish first", 1, WAITING, 1, settled),
    Scenario("one engine, in place, twice wrong", 1, IN_PLACE, 2, settled),
    Scenario("two engines, in place", 2, IN_PLACE, 1, settled),
    Scenario("two engines, staged", 2, STAGED, 1, settled),
    Scenario("two engines, second refit in the kept group", 2, IN_PLACE, 1, second),
    Scenario("two engines that are both needed", 2, PAIR, 1, settled),
    Scenario("two engines, one late", 2, IN_PLACE, 1, late),
    Scenario("three engines, in place", 3, IN_PLACE, 1, settled),
)
"""Explored on every run of the unit tests, as far as the states that are allowed reach."""

DEEP = (
    *BOUNDED,
    Scenario("one engine, staged, twice wrong", 1, STAGED, 2, settled),
    Scenario("two engines, in place, twice wrong", 2, IN_PLACE, 2, settled),
    Scenario("two engines, staged, twice wrong", 2, STAGED, 2, settled),
    Scenario("two engines, staged, rolling", 2, ROLLING, 1, second),
    Scenario("three engines, staged", 3, STAGED, 1, settled),
    Scenario("three engines, one late", 3, STAGED, 1, late),
)
"""Explored by ``make explore``."""
