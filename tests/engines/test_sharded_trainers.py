"""Trainers of two and three FSDP2 ranks: each sends the parts that it holds, nobody gathers, and engines say what the whole model says."""

from pathlib import Path

import pytest
from tests.engines.conftest import Fleets
from tests.engines.refitting import assert_generates
from tests.engines.shardedtrainers import ShardedTrainers, trained_model

from rolloutfleet.contract.policy import Transport

TEAMS = {
    "experts through the loader": ("experts", 3, False),
    "tied Llama on two ranks": ("tied, in place", 3, True),
    "Qwen2 on two engines": ("two in place", 2, True),
}
"""The fleet, the trainer's ranks, and whether everything is written in place once the layout is known."""


@pytest.mark.row("A36")
@pytest.mark.scenario("F37")
@pytest.mark.scenario("F38")
@pytest.mark.scenario("F41")
@pytest.mark.scenario("F43")
@pytest.mark.parametrize("team", TEAMS)
def test_refits_in_a_row_from_sharded_ranks_give_transformers_tokens(
    request: pytest.FixtureRequest, fleets: Fleets, team: str, tmp_path: Path
):
    name, ranks, in_place = TEAMS[team]
    fleet = fleets.ready(request.path.stem, name)
    fleet.start_sync(transport=Transport.LAYOUT)
    results = []
    with ShardedTrainers(fleet, ranks, tmp_path) as trainers:
        for seed in (11, 12, 13):
            results.append(trainers.refit(seed))
            assert_generates(fleet, trained_model(fleet.model, seed))
    first, *later = results
    assert {(result.staged, not result.detours) for result in later} == {(in_place, in_place)}
    assert {result.epoch for result in results} == {first.epoch}
    assert len({result.live_digest for result in results}) == 3
