"""A mixture of experts, whose CPU kernel packs its weights, under the names of memory and those of checkpoints."""

import pytest
import torch
from tests.engines.hostfleet import SOON_SECONDS, HostFleet
from tests.engines.refitting import assert_generates, refit, told_of
from tests.engines.tinymodels import checkpoint_tensors, make_model, named_tensors, vary_vectors

import rolloutfleet
from rolloutfleet.contract.policy import Transport

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
ONE_EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.row("B16")
@pytest.mark.scenario("F37")
@pytest.mark.scenario("F38")
def test_refits_under_both_kinds_of_names_give_transformers_tokens_and_the_same_live_weights(
    fleet: HostFleet, trainer: rolloutfleet.Fleet
):
    assert_generates(fleet, 0)
    live: dict[int, set[str]] = {11: set(), 12: set()}
    for names in (named_tensors, checkpoint_tensors):
        for seed in live:
            model = make_model(fleet.model, seed)
            live[seed].add(refit(fleet, trainer, names(model)).live_digest)
            assert_generates(fleet, model)
    assert [len(digests) for digests in live.values()] == [1, 1]
    assert live[11] != live[12]


@pytest.mark.row("A37")
def test_a_missing_or_misshapen_expert_is_named_and_the_engine_goes_on_serving(
    fleet: HostFleet, trainer: rolloutfleet.Fleet
):
    model = make_model(fleet.model, 21)
    refit(fleet, trainer, named_tensors(model))
    whole, parts = named_tensors(model), checkpoint_tensors(model)
    seven = {name: tensor[:7] if name == GATE_UP else tensor for name, tensor in whole.items()}
    absent = {name: tensor for name, tensor in parts.items() if name != ONE_EXPERT}
    small = parts | {ONE_EXPERT: torch.zeros(32, 128)}
    nine = parts | {ONE_EXPERT.replace(".5.", ".8."): parts[ONE_EXPERT]}
    wrong = {
        "a block of seven experts": (seven, f"wrong shape: tensor {GATE_UP} has shape [7, 128, 128]"),
        "no block": ({name: tensor for name, tensor in whole.items() if name != GATE_UP}, f"missing: {GATE_UP};"),
        "one expert absent": (absent, f"missing: {ONE_EXPERT};"),
        "one expert too many": (nine, "extra: " + ONE_EXPERT.replace(".5.", ".8.")),
        "one expert too small": (small, f"wrong shape: tensor {ONE_EXPERT} has shape [32, 128]"),
    }
    for what, (tensors, words) in wrong.items():
        with pytest.raises(rolloutfleet.ManifestMismatch) as caught:
            trainer.refit(tensors, version=fleet.version + 1, timeout=SOON_SECONDS)
        assert words in str(caught.value), what
    assert_generates(fleet, model)
    refit(fleet, trainer, checkpoint_tensors(make_model(fleet.model, 22)))
    assert_generates(fleet, 22)


@pytest.mark.row("B16")
@pytest.mark.scenario("F37")
@pytest.mark.scenario("F38")
def test_what_kernels_pack_takes_the_detour_in_every_refit_and_the_status_says_why(fleet: HostFleet):
    fleet.start_sync(transport=Transport.LAYOUT)
    with fleet.connect() as trainer:
        for seed in (31, 32, 33):
            model = vary_vectors(make_model(fleet.model, seed))
            result = refit(fleet, trainer, named_tensors(model))
            assert_generates(fleet, model)
            told = told_of(fleet, result)
            assert tuple(told["detours"]) == result.detours
            assert (result.transport, result.staged) == (Transport.LAYOUT, False)
    assert told["reason"].endswith("through vLLM's loader")
    why = "\n".join(told["detours"])
    assert "qkv_proj.weight: packed out of sight after loading" in why
    assert "w13_weight: fused experts of backend CPU are not known to keep the loader's layout" in why
