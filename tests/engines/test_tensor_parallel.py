"""Two ranks and tied embeddings: each rank takes its share, and the packed copy of the head follows the embedding."""

import pytest
import torch
from tests.engines.hostfleet import SOON_SECONDS, HostFleet
from tests.engines.refitting import assert_generates, refit
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet


@pytest.mark.row("A36")
@pytest.mark.scenario("F41")
@pytest.mark.scenario("F43")
def test_refits_in_a_row_give_transformers_tokens(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    assert_generates(fleet, 0)
    for seed in (11, 12):
        model = make_model(fleet.model, seed)
        assert "lm_head.weight" not in named_tensors(model)
        refit(fleet, trainer, named_tensors(model))
        assert_generates(fleet, model)
    assert fleet.engines[0].report().devices == ("cpu", "cpu")


@pytest.mark.scenario("F43")
def test_a_trainer_may_send_the_tied_head_as_well(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    model = make_model(fleet.model, 21)
    plain = refit(fleet, trainer, named_tensors(model))
    doubled = refit(fleet, trainer, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    assert doubled.tensors == plain.tensors + 1
    assert doubled.live_digest == plain.live_digest
    assert_generates(fleet, model)


WRONG = {
    "rows of one rank": (
        {"model.layers.0.self_attn.q_proj.weight": (64, 128)},
        "tensor model.layers.0.self_attn.q_proj.weight has shape [64, 128]",
    ),
    "columns of one rank": (
        {"model.layers.1.mlp.down_proj.weight": (128, 96)},
        "tensor model.layers.1.mlp.down_proj.weight has shape [128, 96]",
    ),
    "rows of three ranks": (
        {"model.layers.0.mlp.gate_proj.weight": (288, 128)},
        "tensor model.layers.0.mlp.gate_proj.weight has shape [288, 128], the model takes only 24576 of its 36864 elements",
    ),
    "a vocabulary of one rank": (
        {"model.embed_tokens.weight": (160, 128)},
        "tensor model.embed_tokens.weight has shape [160, 128]",
    ),
    "what every rank holds whole": (
        {"model.norm.weight": (64,)},
        "tensor model.norm.weight has shape [64], each of 2 ranks takes [128]",
    ),
}


@pytest.mark.row("A37")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_shape_that_is_wrong_on_one_rank_is_named_and_the_engine_goes_on_serving(
    fleet: HostFleet, trainer: rolloutfleet.Fleet, wrong: str
):
    shapes, words = WRONG[wrong]
    tensors = named_tensors(make_model(fleet.model, 31)) | {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(rolloutfleet.ManifestMismatch) as caught:
        trainer.refit(tensors, version=fleet.version + 1, timeout=SOON_SECONDS)
    assert words in str(caught.value)
    assert "missing" not in str(caught.value)
    assert_generates(fleet, 21)


def test_a_refit_after_refused_ones_gives_transformers_tokens(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    refit(fleet, trainer, named_tensors(make_model(fleet.model, 41)))
    assert_generates(fleet, 41)
