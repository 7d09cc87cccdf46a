"""Two ranks, tied embeddings, and a sync job that lets each rank receive its own slices: the whole way of a refit by layout."""

import pytest
import torch
from tests.engines.hostfleet import SOON_SECONDS, HostFleet
from tests.engines.refitting import assert_generates, refit
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet
from rolloutfleet.contract.policy import Transport


@pytest.mark.row("A36")
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


@pytest.mark.row("A39")
@pytest.mark.row("B18")
@pytest.mark.row("B19")
def test_both_ranks_copy_their_slices_out_of_the_memory_that_one_trainer_shows(fleet: HostFleet):
    fleet.start_sync(transport=Transport.COLOCATED)
    with fleet.connect() as trainer:
        for seed in (21, 22):
            assert refit(fleet, trainer, named_tensors(make_model(fleet.model, seed))).transport is Transport.COLOCATED
            assert_generates(fleet, seed)


@pytest.mark.row("A-U6")
def test_tensors_in_shared_memory_are_compared_with_the_model_before_any_is_copied(fleet: HostFleet):
    fleet.start_sync(transport=Transport.COLOCATED)
    norm = "model.norm.weight"
    tensors = named_tensors(make_model(fleet.model, 31))
    with fleet.connect() as trainer:
        refit(fleet, trainer, tensors)
        wrong = {name: tensor for name, tensor in tensors.items() if name != norm} | {"unexpected": torch.zeros(3)}
        with pytest.raises(rolloutfleet.ManifestMismatch, match=f"missing: {norm}; extra: unexpected"):
            trainer.refit(wrong, version=fleet.version + 1, timeout=SOON_SECONDS)
        with pytest.raises(ValueError, match=f"more than once: {norm}"):
            trainer.refit([*tensors.items(), (norm, tensors[norm])], version=fleet.version + 1, timeout=SOON_SECONDS)
        assert_generates(fleet, 31)
        refit(fleet, trainer, named_tensors(make_model(fleet.model, 32)))
    assert_generates(fleet, 32)
