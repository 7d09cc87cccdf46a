"""``refit.verify: Full`` on a rank: what it computes with against a fresh load of the same version through vLLM's own loaders."""

from collections.abc import Iterator

import pytest
from tests.engines.layoutengine import LayoutEngine
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

PROMPT, TOKENS = "abc", 12
SHAPES = {
    "dense, in place": (GROUPED, {"unpacked": True}),
    "dense, packed": (GROUPED, {}),
    "experts": (EXPERTS, {}),
    "tied, on two ranks": (TIED, {"ranks": 2, "unpacked": True}),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LayoutEngine]]:
    launched = {
        name: LayoutEngine(write_model(tmp_path_factory.mktemp("full") / "model", config), **options)
        for name, (config, options) in SHAPES.items()
    }
    yield launched
    for engine in launched.values():
        engine.hang_up()
    for engine in launched.values():
        engine.close()


@pytest.mark.scenario("F40")
@pytest.mark.scenario("F54")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_refit_leaves_what_a_fresh_load_gives_and_the_engine_as_it_was(engines: dict[str, LayoutEngine], shape: str):
    engine = engines[shape]
    engine.call("calibrate", checkpoint_tensors(vary_vectors(make_model(engine.model, 1))))
    for seed in (2, 3):
        model = vary_vectors(make_model(engine.model, seed))
        values = checkpoint_tensors(model)
        engine.call("refit", values, False)
        before = engine.call("identity")
        assert engine.call("fresh", values) == [""] * engine.ranks
        assert engine.call("identity") == before
        assert engine.generate(PROMPT, TOKENS) == greedy_tokens(model, engine.model, PROMPT, TOKENS)


@pytest.mark.scenario("F40")
def test_a_weight_that_is_not_where_a_load_puts_it_is_named(engines: dict[str, LayoutEngine]):
    """The layout, and the digests by it, agree with the live weights; a load does not."""
    engine = engines["dense, in place"]
    values = checkpoint_tensors(vary_vectors(make_model(engine.model, 4)))
    engine.call("calibrate", values)
    engine.call("refit", values, False)
    assert engine.one("fresh", values, "permuting") == (
        "the live weights are not those of a fresh load of the same version: model.layers.0.self_attn.o_proj.weight, "
        "model.layers.1.self_attn.o_proj.weight differ"
    )


@pytest.mark.scenario("F41")
def test_weights_that_a_load_through_the_loader_has_left_behind_are_found(engines: dict[str, LayoutEngine]):
    """What packed layers compute from is in no parameter: their tensors came, and the live model computes with those of before."""
    engine = engines["dense, packed"]
    old, new = (checkpoint_tensors(vary_vectors(make_model(engine.model, seed))) for seed in (5, 6))
    engine.call("calibrate", old)
    came = {name: new[name] if name.endswith("down_proj.weight") else old[name] for name in old}
    assert engine.one("fresh", old) == ""
    assert engine.one("fresh", came).endswith("what its kernels have packed differ")
