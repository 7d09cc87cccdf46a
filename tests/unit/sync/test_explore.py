"""Every interleaving of loss, delay, duplicate and restart, within bounds: no promise is broken, and everything comes to rest."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fakes.explored.explorer import Exploration, check, come_to_rest
from fakes.explored.keys import key_of
from fakes.explored.moves import next_moves, take
from fakes.explored.scenarios import BOUNDED, ROLLING, WAITING, Scenario, late, second, settled
from fakes.explored.world import IN_PLACE, STAGED, World

STATES = 1500
"""Of each scenario; ``make explore`` has no such bound."""


@pytest.mark.parametrize("scenario", BOUNDED, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_no_interleaving_breaks_a_promise(scenario: Scenario):
    seen = scenario.explore(depth=400, states=STATES)
    print(f"{scenario.name}: {seen.states} states, {seen.transitions} transitions, depth {seen.depth}")
    assert seen.states == STATES or seen.complete
    assert seen.rests


def test_engines_that_are_alike_can_change_places():
    world = BOUNDED[-1].start()
    turned = world
    first, *others = [move for move in next_moves(world) if move.name.startswith("f-") and move.name.endswith("dies")]
    for move in others:
        turned = take(world, move)
        assert key_of(turned) == key_of(take(world, first))
    assert turned.engines != take(world, first).engines


class AnyTrouble(RuleBasedStateMachine):
    """Long ways with many faults, which no search reaches: each ends at rest, and a refit after it brings everybody along."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.names: list[str] = []

    @initialize(
        engines=st.integers(1, 4),
        policy=st.sampled_from([IN_PLACE, STAGED, WAITING, ROLLING]),
        begin=st.sampled_from([settled, second, late]),
    )
    def start(self, engines: int, policy: Any, begin: Any):
        self.world = Scenario("any", engines, policy, 8, begin, refits=3).start()

    @rule(steps=st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    def anything_happens(self, steps: list[int]):
        for choice in steps:
            assert self.world is not None
            moves = next_moves(self.world)
            ordinary = [move for move in moves if not move.cost]
            move = moves[choice % len(moves)] if choice % 5 == 0 else ordinary[choice % len(ordinary)]
            self.names.append(move.name)
            after = take(self.world, move)
            broken = check(self.world, after)
            assert broken is None, (broken, self.names)
            self.world = after

    def teardown(self):
        if self.world is not None:
            come_to_rest(Exploration("any"), self.world, hash(key_of(self.world)))


AnyTrouble.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None, print_blob=True)
test_any_trouble = AnyTrouble.TestCase
