"""What the exploration has found in the protocol, one way to each."""

from fakes.explored.moves import calm_move, next_moves, take
from fakes.explored.scenarios import Scenario, late, settled
from fakes.explored.world import IN_PLACE, World
from rolloutfleet.contract.trainer import Phase


def _happens(world: World, name: str) -> World:
    """Go on calmly until this can happen, and let it."""
    for _ in range(200):
        chosen = next((move for move in next_moves(world) if move.name == name), None)
        if chosen is not None:
            return take(world, chosen)
        world = take(world, calm_move(world))
    raise AssertionError(f"{name} never can")


def _end_of_refit(world: World) -> World:
    for _ in range(200):
        if world.active is None and world.state.refit is not None:
            return world
        world = take(world, calm_move(world))
    raise AssertionError("the refit does not end")


def test_a_check_that_nobody_answers_ends_with_its_deadline():
    world = Scenario("silent", 1, IN_PLACE, 1, settled).start()
    world = _happens(world, "check to f-0-0-1 is kept back")
    for _ in range(2):
        world = _happens(world, "time passes")
    refit = world.state.refit
    assert refit is not None
    assert refit.phase is Phase.FAILED
    assert refit.problem is not None
    assert "no answer to check from f-0-0-1" in refit.problem.message
    assert not world.doubts


def test_a_member_that_is_lost_before_it_left_cannot_answer_into_the_next_attempt():
    world = Scenario("lost", 2, IN_PLACE, 1, settled).start()
    for name in ("receive to f-0-0-1 arrives", "f-1-0-2 dies", "the transfer of f-0-0-1 breaks"):
        world = _happens(world, name)
    for name in ("a failure of uid-1 to receive is heard", "f-1-0-2 is replaced", "the roster arrives"):
        world = _happens(world, name)
    ended = _end_of_refit(world).state.refit
    assert ended is not None
    assert ended.phase is Phase.COMPLETE
    assert ended.attempt == 2


def test_the_wait_for_absent_engines_leaves_time_to_form_the_group():
    world = Scenario("late", 2, IN_PLACE, 1, late).start()
    world = _happens(world, "report to f-0-0-1 is kept back")
    world = _happens(world, "time passes")
    ended = _end_of_refit(_happens(world, "the roster arrives")).state.refit
    assert ended is not None
    assert ended.committed, ended.problem
