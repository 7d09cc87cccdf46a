"""Two ranks, tied embeddings, and a sync job that lets each rank receive its own slices: the whole way of a refit by layout."""

import pytest
from tests.engines.hostfleet import HostFleet
from tests.engines.refitting import assert_generates, refit
from tests.engines.tinymodels import make_model, named_tensors

from rolloutfleet.contract.policy import Transport


@pytest.mark.row("A36")
@pytest.mark.scenario("F41")
def test_refits_in_a_row_give_transformers_tokens_and_are_staged_once_the_layout_is_known(fleet: HostFleet):
    fleet.start_sync(transport=Transport.LAYOUT)
    with fleet.connect() as trainer:
        results = []
        for seed in (11, 12, 13):
            results.append(refit(fleet, trainer, named_tensors(make_model(fleet.model, seed))))
            assert_generates(fleet, seed)
    first, *others = results
    assert {result.transport for result in results} == {Transport.LAYOUT}
    assert first.detours
    assert not first.staged
    assert [(result.detours, result.staged) for result in others] == [((), True)] * 2
    assert all(0 < result.pause_seconds < 2 for result in others)
