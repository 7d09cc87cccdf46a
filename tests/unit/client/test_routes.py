"""Along which ranks messages travel, and which are begun together."""

import pytest

from rolloutfleet.transport.routes import (
    MESSAGE_BYTES,
    STEP_BYTES,
    Audience,
    Place,
    Route,
    choose_route,
    cut_steps,
    first_hops,
    place_of,
    step_limit,
)

LONE = Audience("a", (3,))
FOUR = Audience("a", (2, 4, 6, 8))


@pytest.mark.parametrize(
    ("audience", "audiences", "trainer_ranks", "route"),
    [
        (LONE, 1, 1, Route.BROADCAST),
        (FOUR, 1, 1, Route.BROADCAST),
        (FOUR, 1, 2, Route.CHAIN),
        (FOUR, 2, 1, Route.CHAIN),
        (LONE, 2, 1, Route.EACH),
        (LONE, 1, 3, Route.EACH),
    ],
)
def test_a_collective_serves_one_audience_of_one_sender_and_a_chain_several_ranks(
    audience: Audience, audiences: int, trainer_ranks: int, route: Route
) -> None:
    assert choose_route(audience, audiences, trainer_ranks) is route


def test_a_chain_reaches_every_rank_once_from_the_first_on() -> None:
    assert first_hops(Route.CHAIN, FOUR) == (2,)
    reached, place = [2], place_of(Route.CHAIN, FOUR, 2)
    while place.after is not None:
        assert place_of(Route.CHAIN, FOUR, place.after).before == reached[-1]
        reached.append(place.after)
        place = place_of(Route.CHAIN, FOUR, place.after)
    assert tuple(reached) == FOUR.ranks


def test_without_a_chain_nobody_forwards() -> None:
    for route in (Route.EACH, Route.BROADCAST):
        assert first_hops(route, FOUR) == FOUR.ranks
        assert place_of(route, FOUR, 4) == Place(None, None)


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([], []),
        ([5], [[0]]),
        ([4, 6], [[0, 1]]),
        ([4, 7], [[0], [1]]),
        ([30, 1, 1], [[0], [1, 2]]),
        ([1, 30, 1], [[0], [1], [2]]),
        ([3, 3, 3, 3], [[0, 1, 2], [3]]),
    ],
)
def test_messages_that_follow_each_other_travel_together_up_to_the_limit(
    sizes: list[int], steps: list[list[int]]
) -> None:
    assert [list(step) for step in cut_steps(sizes, 10)] == steps


def test_audiences_share_a_step_but_each_has_room_for_a_message() -> None:
    assert step_limit(Route.EACH, 1) == STEP_BYTES
    assert step_limit(Route.EACH, 2) == STEP_BYTES // 2
    assert step_limit(Route.EACH, 64) == MESSAGE_BYTES
