"""Layouts captured from real vLLM: they explain every byte, hold per element, and disturb nothing."""

from collections import Counter
from collections.abc import Iterator
from math import prod

import pytest
import torch
from tests.engines.layoutengine import LayoutEngine, Tensors, manifest_of
from tests.engines.tinymodels import (
    EXPERTS,
    GROUPED,
    TIED,
    checkpoint_tensors,
    greedy_tokens,
    make_model,
    vary_vectors,
    write_model,
)

from rolloutfleet.layout import Layout

PROMPT = "The fleet is"
TOKENS = 12
SHAPES = {
    "dense, in place": (GROUPED, {"unpacked": True}),
    "dense, packed": (GROUPED, {}),
    "dense in bfloat16, in place": (GROUPED, {"unpacked": True, "dtype": "bfloat16"}),
    "tied, in place": (TIED, {"unpacked": True}),
    "tied, packed": (TIED, {}),
    "experts": (EXPERTS, {"unpacked": True}),
    "dense on two ranks": (GROUPED, {"unpacked": True, "ranks": 2}),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LayoutEngine]]:
    """Those that are up or coming up, by shape."""
    launched: dict[str, LayoutEngine] = {}
    yield launched
    for engine in launched.values():
        engine.hang_up()
    for engine in launched.values():
        engine.close()


@pytest.fixture(scope="module", params=SHAPES)
def engine(
    request: pytest.FixtureRequest, engines: dict[str, LayoutEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LayoutEngine]:
    names = list(SHAPES)
    at = names.index(request.param)
    # The next one comes up meanwhile: a start keeps one core busy.
    for name in names[at : at + 2]:
        if name not in engines:
            config, options = SHAPES[name]
            engines[name] = LayoutEngine(write_model(tmp_path_factory.mktemp("layout") / "model", config), **options)
    yield engines[request.param]
    engines[request.param].hang_up()


def tensors(engine: LayoutEngine, seed: int) -> dict[str, torch.Tensor]:
    return checkpoint_tensors(vary_vectors(make_model(engine.model, seed)))


def same_tokens(engine: LayoutEngine, seed: int) -> bool:
    model = vary_vectors(make_model(engine.model, seed))
    return engine.generate(PROMPT, TOKENS) == greedy_tokens(model, engine.model, PROMPT, TOKENS)


def reasons(layout: Layout, sources: Tensors) -> dict[str, str]:
    names = list(sources)
    return {names[detour.source]: detour.reason for detour in layout.detours}


def test_capture_leaves_objects_bytes_and_tokens_alone_also_when_a_loader_raises(engine: LayoutEngine):
    before, tokens = engine.call("identity"), engine.generate(PROMPT, TOKENS)
    manifest = manifest_of(tensors(engine, 0))
    for _, faults in engine.call("capture", manifest):
        assert faults["missing"] == faults["extra"] == faults["misshapen"] == []
    for _, faults in engine.call("capture_with", "raising", manifest):
        assert [sentence.split()[1] for sentence in faults["misshapen"]] == ["model.layers.0.input_layernorm.weight"]
    assert engine.call("identity") == before
    assert engine.generate(PROMPT, TOKENS) == tokens
    assert engine.call("capture", manifest)[0][1]["misshapen"] == []


def test_a_scale_that_every_load_computes_anew_is_no_missing_tensor(engine: LayoutEngine):
    for _, faults in engine.call("capture_with", "scaling", manifest_of(tensors(engine, 0))):
        assert faults["missing"] == faults["extra"] == faults["misshapen"] == []


@pytest.mark.scenario("F40")
def test_every_byte_of_every_parameter_is_placed_filled_or_left_to_the_loader(engine: LayoutEngine):
    engine.call("calibrate", tensors(engine, 3))
    for which in ("traced", "verified"):
        for explained, nbytes in engine.call("explained", which):
            assert explained["unexplained"] == ()
            assert explained["placed"] + explained["filled"] + explained["loaded"] == nbytes


def test_a_real_load_puts_each_element_where_the_trace_says(engine: LayoutEngine):
    for seed in (4, 5):
        values = tensors(engine, seed)
        engine.call("calibrate", values)
        for which in ("traced", "verified"):
            assert engine.call("wrong_elements", values, which) == [[]] * engine.ranks
    assert all(engine.call("wrong_elements", tensors(engine, 6), "verified"))


def test_calibration_places_what_kernels_compute_from_and_says_why_not_for_the_rest(engine: LayoutEngine):
    values = tensors(engine, 7)
    for layout in engine.call("calibrate", values):
        found = Counter(reason.partition(": ")[2] or reason for reason in reasons(layout, values).values())
        kernels = {reason for reason in found if "backend CPU" in reason}
        packed = {reason for reason in found if "packed" in reason}
        assert set(found) == kernels | packed
        assert bool(kernels) == ("model.layers.0.mlp.gate.weight" in values)
        assert bool(packed) != engine.unpacked
        if not found:
            assert layout.detoured_bytes == 0


def test_ranks_together_take_each_element_of_each_source_equally_often(engine: LayoutEngine):
    engine.call("calibrate", tensors(engine, 8))
    placed = engine.call("taken")
    detoured = {name for layout in engine.call("verified") for name in reasons(layout, tensors(engine, 8))}
    replicated = []
    for name in placed[0].keys() - detoured:
        total = torch.stack([counts[name] for counts in placed]).sum(0)
        assert total.unique().tolist() in ([1], [engine.ranks]), name
        replicated += [name] if total[0] == engine.ranks else []
    if engine.ranks > 1:
        assert {"model.norm.weight"} <= set(replicated) < placed[0].keys() - detoured


@pytest.mark.row("A-U9")
@pytest.mark.scenario("F37")
@pytest.mark.scenario("F38")
@pytest.mark.scenario("F41")
@pytest.mark.scenario("F43")
def test_refits_in_a_row_by_the_layout_give_transformers_tokens_and_the_bytes_of_a_fresh_load(engine: LayoutEngine):
    engine.call("calibrate", tensors(engine, 11))
    for seed in (12, 13):
        refitted = [digest for digest, _ in engine.call("refit", tensors(engine, seed), False)]
        # In bfloat16 transformers rounds elsewhere, so that only bytes are compared.
        assert engine.dtype == "bfloat16" or same_tokens(engine, seed)
        assert engine.call("load", tensors(engine, seed)) == refitted
        assert refitted != engine.call("load", tensors(engine, seed + 1))


@pytest.mark.row("B15")
def test_each_module_is_processed_once_in_a_load_and_only_when_all_its_tensors_have_come(engine: LayoutEngine):
    for processed in engine.call("processing", tensors(engine, 10)):
        assert {"model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.o_proj"} <= processed.keys()
        assert {name: times for name, times in processed.items() if times != [True]} == {}


def test_a_partial_reload_puts_no_other_module_on_meta(engine: LayoutEngine):
    values = tensors(engine, 14)
    layouts = engine.call("calibrate", values)
    before = engine.call("identity")
    for (_, on_meta), layout in zip(engine.call("refit", values, False), layouts, strict=True):
        names = [layout.parameters[placement.parameter].name for placement in layout.placements]
        placed = {name.rpartition(".")[0] for name in names[: len(names) - len(layout.detours)]}
        assert bool(on_meta) == bool(layout.detours)
        assert not placed & set(on_meta)
    after = engine.call("identity")
    moved = {name for old, new in zip(before, after, strict=True) for name in old if old[name][1] != new[name][1]}
    assert not any("embed_tokens" in name or name.endswith("norm.weight") for name in moved)


def test_a_partial_reload_that_ends_half_way_leaves_the_model_sound(engine: LayoutEngine):
    values = tensors(engine, 15)
    engine.call("calibrate", values)
    assert engine.call("abandoned", values) == [True] * engine.ranks
    whole = engine.call("load", values)
    assert [digest for digest, _ in engine.call("refit", values, False)] == whole


@pytest.mark.scenario("F54")
def test_the_live_digest_sees_one_element_and_only_in_its_module(engine: LayoutEngine):
    whole = engine.call("load", tensors(engine, 16))
    norm, others = ["model.norm"], ["model.layers.0.input_layernorm"]
    before = engine.call("digest", norm), engine.call("digest", others)
    engine.call("touch", "model.norm.weight", 5)
    assert engine.call("digest") != whole
    assert engine.call("digest", norm) != before[0]
    assert engine.call("digest", others) == before[1]
    engine.call("touch", "model.norm.weight", 5)
    assert engine.call("digest") == whole


def test_engines_of_one_shape_have_equal_layouts(engine: LayoutEngine):
    first, again = (engine.call("calibrate", tensors(engine, seed)) for seed in (17, 18))
    assert [layout.digest for layout in first] == [layout.digest for layout in again]
    assert [Layout.decode(layout.encode()) for layout in first] == first
    assert {layout.shape for layout in first} == set(engine.call("shape"))
    assert all(prod(spec.shape) for spec in manifest_of(tensors(engine, 17)).tensors)
