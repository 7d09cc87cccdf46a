"""An adapter on two ranks: both verify it, one writes it down, each loads its own share."""

from typing import Any

import pytest
import torch
from tests.engines.hostfleet import SERVED_NAME, HostFleet
from tests.engines.loras import CONFIG, adapter_tensors, assert_says, merged, refit_adapter
from tests.engines.refitting import refit
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet


def test_adapters_and_full_refits_give_transformers_tokens(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    for base, seed in ((0, 1), (11, 2)):
        if base:
            refit(fleet, trainer, named_tensors(make_model(fleet.model, base)))
        tensors = adapter_tensors(fleet.model, seed)
        refit_adapter(fleet, trainer, "style", tensors)
        assert_says(fleet, "style", merged(fleet.model, base, tensors))
        assert_says(fleet, SERVED_NAME, make_model(fleet.model, base))


SHARES: dict[str, Any] = {
    "q_proj.lora_B.weight": ((64, 8), "[128, 8]"),
    "k_proj.lora_B.weight": ((32, 8), "[64, 8]"),
    "o_proj.lora_A.weight": ((8, 64), "[8, 128]"),
}


@pytest.mark.parametrize("half", SHARES)
def test_the_share_of_one_rank_is_refused(fleet: HostFleet, trainer: rolloutfleet.Fleet, half: str):
    shape, wanted = SHARES[half]
    tensors = adapter_tensors(fleet.model, 3)
    tensors[f"base_model.model.model.layers.0.self_attn.{half}"] = torch.zeros(shape)
    with pytest.raises(rolloutfleet.ManifestMismatch) as caught:
        trainer.refit_adapter("style", tensors, fleet.version + 1, CONFIG, timeout=60)
    assert wanted in str(caught.value)
