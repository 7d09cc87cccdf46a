"""What a layout may not hold: computed, permuted or unproved weights; what a manifest must hold; and what peers may copy."""

from collections.abc import Iterator

import pytest
import torch
from tests.engines.layoutengine import LayoutEngine, Tensors, manifest_of
from tests.engines.tinymodels import (
    EXPERTS,
    GROUPED,
    checkpoint_tensors,
    greedy_tokens,
    make_model,
    named_tensors,
    vary_vectors,
    write_model,
)

from rolloutfleet.layout import Layout

PROMPT = "abc"
TOKENS = 12
NORM = "model.layers.0.input_layernorm.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
K_BIAS = "model.layers.0.self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LayoutEngine]]:
    """All of the module's, coming up side by side."""
    shapes = {
        "experts on one rank": (EXPERTS, {}),
        "experts on two ranks": (EXPERTS, {"ranks": 2}),
        "dense": (GROUPED, {"unpacked": True}),
    }
    launched = {
        name: LayoutEngine(write_model(tmp_path_factory.mktemp("calibration") / "model", config), **options)
        for name, (config, options) in shapes.items()
    }
    yield launched
    for engine in launched.values():
        engine.hang_up()
    for engine in launched.values():
        engine.close()


@pytest.fixture(scope="module")
def dense(engines: dict[str, LayoutEngine]) -> LayoutEngine:
    return engines["dense"]


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def experts(request: pytest.FixtureRequest, engines: dict[str, LayoutEngine]) -> LayoutEngine:
    return engines[f"experts on {request.param}"]


def tensors(engine: LayoutEngine, seed: int) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(vary_vectors(make_model(engine.model, seed)))


def reasons(layout: Layout, sources: Tensors) -> dict[str, str]:
    names = list(sources)
    return {names[detour.source]: detour.reason for detour in layout.detours}


@pytest.mark.scenario("F37")
def test_experts_that_a_kernel_prepacks_in_the_same_shape_do_not_calibrate(experts: LayoutEngine):
    values = tensors(experts, 1)
    for layout in experts.call("calibrate_with", values, "trusting experts"):
        detours = reasons(layout, values)
        moved = {name for name, reason in detours.items() if "elsewhere" in reason}
        assert {name for name in values if ".experts." in name} <= moved
        assert "model.norm.weight" not in detours


@pytest.mark.parametrize("names", [checkpoint_tensors, named_tensors], ids=["one by one", "in blocks"])
def test_a_load_that_is_not_prepacked_puts_every_expert_where_the_trace_says(experts: LayoutEngine, names):
    values = names(vary_vectors(make_model(experts.model, 2)))
    for layout in experts.call("calibrate_with", values, "not prepacking"):
        detours = reasons(layout, values)
        assert not any(".experts." in name for name in detours)
    assert experts.call("wrong_elements", values, "verified") == [[]] * experts.ranks
    assert all(explained["unexplained"] == () for explained, _ in experts.call("explained", "verified"))
    for name, total in sum_of(experts.call("taken")).items():
        if ".experts." in name:
            assert total.unique().tolist() == [1], name
    experts.call("load", values)


@pytest.mark.scenario("F39")
@pytest.mark.row("B16")
@pytest.mark.scenario("F37")
@pytest.mark.scenario("F38")
def test_two_partial_reloads_of_prepacked_experts_give_transformers_tokens(experts: LayoutEngine):
    experts.call("calibrate", tensors(experts, 3))
    for seed in (4, 5):
        model = vary_vectors(make_model(experts.model, seed))
        experts.call("refit", checkpoint_tensors(model), False)
        assert experts.generate(PROMPT, TOKENS) == greedy_tokens(model, experts.model, PROMPT, TOKENS)


def sum_of(counts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([each[name] for each in counts]).sum(0) for name in counts[0]}


@pytest.mark.scenario("F39")
@pytest.mark.scenario("F40")
def test_a_parameter_that_post_processing_permutes_does_not_calibrate(dense: LayoutEngine):
    values = tensors(dense, 6)
    detours = reasons(dense.one("calibrate_with", values, "permuting"), values)
    assert set(detours) == {name for name in values if name.endswith("o_proj.weight")}
    assert detours[O_PROJ] == f"{O_PROJ}: the load put it elsewhere than traced, or changed it"
    assert reasons(dense.one("calibrate", values), values) == {}


def test_a_matrix_of_one_value_proves_nothing_until_it_varies(dense: LayoutEngine):
    values = tensors(dense, 7)
    constant = values | {O_PROJ: torch.full_like(values[O_PROJ], 0.5), K_BIAS: torch.zeros_like(values[K_BIAS])}
    constant[NORM] = torch.ones_like(values[NORM])
    detours = reasons(dense.one("calibrate", constant), values)
    assert detours == {O_PROJ: f"{O_PROJ}: holds one value only, which proves nothing of its order"}
    dense.call("refit", tensors(dense, 8), True)
    assert reasons(dense.one("verified"), values) == {}
    assert dense.one("wrong_elements", tensors(dense, 8), "verified") == []


def test_a_bias_of_one_value_takes_its_module_along_when_no_weight_vouches_for_it(dense: LayoutEngine):
    values = tensors(dense, 9)
    parts = [name for name in values if name.startswith("model.layers.0.self_attn.") and "o_proj" not in name]
    constant = {name: torch.ones_like(tensor) if name in parts else tensor for name, tensor in values.items()}
    assert set(reasons(dense.one("calibrate", constant), values)) == set(parts)


LOADERS = {
    "composed": f"{NORM}: vLLM's loader computes it (neg)",
    "multiplying": f"{NORM}: vLLM's loader computes it (mul)",
    "twice": f"{NORM}: written more than once in the same place",
}


@pytest.mark.scenario("F40")
@pytest.mark.parametrize("loader", LOADERS)
def test_what_a_loader_does_beyond_copying_is_told(dense: LayoutEngine, loader: str):
    values = tensors(dense, 10)
    layout, faults = dense.one("capture_with", loader, manifest_of(values))
    assert faults["missing"] == faults["extra"] == faults["misshapen"] == []
    assert reasons(layout, values) == {NORM: LOADERS[loader]}


def test_elements_that_no_tensor_fills_are_missing(dense: LayoutEngine):
    _, faults = dense.one("capture_with", "halved", manifest_of(tensors(dense, 10)))
    assert faults["missing"] == [f"part of {NORM}"]
    assert faults["consumed"] == {NORM: 64}


@pytest.mark.parametrize(("dtype", "placed"), [(torch.bfloat16, True), (torch.float8_e4m3fn, False)])
def test_only_plain_casts_are_made_by_the_sender(dense: LayoutEngine, dtype: torch.dtype, placed: bool):
    values = tensors(dense, 11)
    values[NORM] = values[NORM].to(dtype)
    detours = reasons(dense.one("calibrate", values), values)
    assert bool(detours) != placed
    if not placed:
        assert detours == {NORM: f"{NORM}: float8_e4m3fn is not simply cast to float32"}


@pytest.mark.scenario("F44")
def test_an_engine_that_balances_experts_is_refused(dense: LayoutEngine):
    message = dense.one("attempt", "balancing", manifest_of(tensors(dense, 12)))
    assert message.startswith("the engine balances experts (enable_eplb)")


@pytest.mark.row("A-U9")
@pytest.mark.row("A40")
@pytest.mark.scenario("F42")
def test_an_8_bit_cache_needs_the_scales_of_keys_and_values_from_the_trainer(dense: LayoutEngine):
    values = tensors(dense, 13)
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    live = [f"{layer}.attn.{kind}_scale" for layer in layers for kind in "kv"]
    assert dense.one("with_cache_scales", manifest_of(values), "fp8") == (live, [])
    assert dense.one("with_cache_scales", manifest_of(values), "auto") == ([], [])
    assert dense.one("with_cache_scales", manifest_of(values), "fp8_per_token_head") == ([], [])
    given = values | dict.fromkeys(live, torch.ones(()))
    assert dense.one("with_cache_scales", manifest_of(given), "fp8") == ([], [])
    del given[live[3]]
    assert dense.one("with_cache_scales", manifest_of(given), "fp8_e4m3") == ([live[3]], [])


@pytest.mark.scenario("F42")
def test_a_scale_of_zeros_is_refused_by_name(dense: LayoutEngine):
    scales = {"a.k_scale": torch.ones(()), "b.weight_scale_inv": torch.zeros(2, 2), "c.weight": torch.zeros(2)}
    assert dense.one("refuse_zero_scale", scales) == (
        "scales that are all zero: b.weight_scale_inv; send the scales of the quantised weights"
    )


def test_a_peer_that_takes_all_live_tensors_computes_what_the_lender_does(dense: LayoutEngine):
    models = [vary_vectors(make_model(dense.model, seed)) for seed in (14, 15)]
    lent = dense.one("load", checkpoint_tensors(models[0])), dense.one("lend")
    assert dense.one("load", checkpoint_tensors(models[1])) != lent[0]
    dense.one("borrow", lent[1])
    assert dense.one("digest") == lent[0]
    assert dense.generate(PROMPT, TOKENS) == greedy_tokens(models[0], dense.model, PROMPT, TOKENS)


def test_packed_copies_are_not_lent(experts: LayoutEngine):
    with pytest.raises(AssertionError, match="computes from a packed copy"):
        experts.call("lend")
