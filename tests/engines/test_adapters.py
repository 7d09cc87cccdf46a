"""Adapters on two engines: each version says what transformers says with merged weights, the base stays what it was."""

import stat
import threading
import urllib.error
from pathlib import Path

import pytest
import torch
from tests.engines.driving import SECONDS, Epoch, call
from tests.engines.hostfleet import SERVED_NAME, HostFleet, Launched, await_that
from tests.engines.loras import CONFIG, adapter_tensors, assert_says, merged, refit_adapter
from tests.engines.refitting import PROMPTS, TOKENS, refit
from tests.engines.tinymodels import greedy_tokens, make_model, named_tensors

import rolloutfleet
from rolloutfleet.adapters import adapter_spec
from rolloutfleet.contract.policy import PauseMode, Transport, Wire
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS


def folder_of(engine: Launched) -> Path:
    environment = Path(f"/proc/{min(engine.vllm_processes())}/environ").read_text().split("\0")
    return Path(next(line.partition("=")[2] for line in environment if line.startswith(f"{ENV_ADAPTERS}=")))


@pytest.mark.row("B13")
@pytest.mark.row("B14")
@pytest.mark.scenario("F51")
def test_each_version_of_an_adapter_says_its_own_tokens_to_prompts_whose_blocks_are_cached(
    fleet: HostFleet, trainer: rolloutfleet.Fleet
):
    base = make_model(fleet.model, 0)
    assert_says(fleet, SERVED_NAME, base)
    seen = [greedy_tokens(base, fleet.model, PROMPTS[0], TOKENS)]
    for seed in (1, 2, 3):
        tensors = adapter_tensors(fleet.model, seed)
        result = refit_adapter(fleet, trainer, "style", tensors)
        model = merged(fleet.model, 0, tensors)
        assert_says(fleet, "style", model)
        assert [engine.answered_by for engine in fleet.engines] == [f"style-v{result.version}"] * 2
        assert_says(fleet, f"style-v{result.version}", model)
        assert_says(fleet, SERVED_NAME, base)
        seen.append(greedy_tokens(model, fleet.model, PROMPTS[0], TOKENS))
        assert result.pause_seconds < 1
    assert len({tuple(tokens) for tokens in seen}) == 4
    assert_says(fleet, f"style-v{fleet.version - 1}", merged(fleet.model, 0, adapter_tensors(fleet.model, 2)))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fleet.engines[0].generate(PROMPTS[0], TOKENS, f"style-v{fleet.version - 2}")
    texts = [trainer.generate_text([PROMPTS[0]], greedy=True, adapter=name)["texts"] for name in ("style", None)]
    assert texts[0] != texts[1]
    assert [member.adapters for member in trainer.view().members] == [{"style": fleet.version}] * 2


def test_adapters_stand_side_by_side_and_files_are_few_and_private(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    style = adapter_tensors(fleet.model, 4)
    tone = adapter_tensors(fleet.model, 5, modules=("q_proj", "down_proj"))
    refit_adapter(fleet, trainer, "style", style)
    configs = (CONFIG, {**CONFIG, "use_rslora": True}, {**CONFIG, "lora_alpha": 32})
    versions = [refit_adapter(fleet, trainer, "tone", tone, config).version for config in configs]
    assert_says(fleet, "style", merged(fleet.model, 0, style))
    assert_says(fleet, f"tone-v{versions[1]}", merged(fleet.model, 0, tone, scale=16 / 8**0.5))
    assert_says(fleet, "tone", merged(fleet.model, 0, tone, scale=4))
    for engine in fleet.engines:
        folder = folder_of(engine)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(list((folder / "tone").iterdir())) == 3
        refit_adapter(fleet, trainer, "tone", tone)
        assert len(list((folder / "tone").iterdir())) == 3


WRONG = {
    "rank": ({}, {"r": 16}, "adapter style has rank 16, vLLM takes up to 8 (--max-lora-rank)"),
    "a half's rank": (
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 128)},
        {},
        "tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight has shape [4, 128], half A of rank 8 is [8, 128]",
    ),
    "output size": (
        {"base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight": (128, 8)},
        {},
        "tensor base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight has shape [128, 8], half B of rank 8 is [64, 8]",
    ),
    "a layer too many": (
        {"base_model.model.model.layers.2.mlp.up_proj.lora_A.weight": (8, 128)},
        {},
        "extra: base_model.model.model.layers.2.mlp.up_proj.lora_A.weight",
    ),
    "a fused name": (
        {"base_model.model.model.layers.0.mlp.gate_up_proj.lora_A.weight": (8, 128)},
        {},
        "extra: base_model.model.model.layers.0.mlp.gate_up_proj.lora_A.weight",
    ),
    "base weights": ({"model.norm.weight": (128,)}, {}, "extra: model.norm.weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_by_name_and_number(
    fleet: HostFleet, trainer: rolloutfleet.Fleet, wrong: str
):
    shapes, config, words = WRONG[wrong]
    tensors = adapter_tensors(fleet.model, 6) | {name: torch.ones(shape) for name, shape in shapes.items()}
    before = trainer.view().members
    with pytest.raises(rolloutfleet.ManifestMismatch) as caught:
        trainer.refit_adapter("style", tensors, fleet.version + 1, {**CONFIG, **config}, timeout=60)
    assert words in str(caught.value)
    assert [m.adapters for m in trainer.view().members] == [m.adapters for m in before]
    assert_says(fleet, SERVED_NAME, make_model(fleet.model, 0))


def test_half_an_adapter_is_refused(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    tensors = adapter_tensors(fleet.model, 6)
    del tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    with pytest.raises(rolloutfleet.ManifestMismatch, match=r"missing: .*layers.1.mlp.down_proj.lora_B.weight"):
        trainer.refit_adapter("style", tensors, fleet.version + 1, CONFIG, timeout=60)
    with pytest.raises(rolloutfleet.InvalidRequest, match="the name under which engines serve the model itself"):
        trainer.refit_adapter(SERVED_NAME, adapter_tensors(fleet.model, 6), fleet.version + 1, CONFIG, timeout=60)


@pytest.mark.row("B23")
def test_full_refits_and_adapters_take_turns_out_of_shared_memory(fleet: HostFleet):
    fleet.start_sync(transport=Transport.AUTO, pause=PauseMode.WAIT)
    style = adapter_tensors(fleet.model, 8)
    with fleet.connect() as trainer:
        for seed in (21, 22):
            result = refit_adapter(fleet, trainer, "style", style)
            assert result.transport is Transport.COLOCATED
            refit(fleet, trainer, named_tensors(make_model(fleet.model, seed)))
            assert_says(fleet, SERVED_NAME, make_model(fleet.model, seed))
            assert_says(fleet, "style", merged(fleet.model, seed, style))
        style = adapter_tensors(fleet.model, 9)
        refit_adapter(fleet, trainer, "style", style)
    assert_says(fleet, "style", merged(fleet.model, 22, style))


def test_no_request_fails_or_mixes_versions_while_adapters_are_replaced(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    refit(fleet, trainer, named_tensors(make_model(fleet.model, 22)))
    adapters = [adapter_tensors(fleet.model, seed) for seed in (31, 32, 33, 34)]
    refit_adapter(fleet, trainer, "style", adapters[0])
    over, answers, failures = threading.Event(), [], []

    def ask(engine: Launched, prompt: str) -> None:
        while not over.is_set():
            try:
                answers.append((prompt, engine.generate(prompt, 48, "style")[0]))
            except OSError as error:
                failures.append(error)

    clients = [threading.Thread(target=ask, args=(e, p)) for e in fleet.engines for p in PROMPTS[:2]]
    for client in clients:
        client.start()
    try:
        for tensors in adapters[1:]:
            seen = len(answers)
            await_that("requests are answered", lambda seen=seen: len(answers) >= seen + 4 or failures)
            refit_adapter(fleet, trainer, "style", tensors)
        seen = len(answers)
        await_that("requests are answered", lambda: len(answers) >= seen + 4 or failures)
    finally:
        over.set()
        for client in clients:
            client.join(SECONDS)
    assert failures == []
    models = [merged(fleet.model, 22, tensors) for tensors in adapters]
    whole = {prompt: [greedy_tokens(m, fleet.model, prompt, 48) for m in models] for prompt in PROMPTS[:2]}
    assert [answer for prompt, answer in answers if answer not in whole[prompt]] == []


def test_an_engine_that_was_behind_takes_over_adapters_with_the_weights(fleet: HostFleet):
    with fleet.connect() as trainer:
        refit(fleet, trainer, named_tensors(make_model(fleet.model, 22)))
    fleet.stop_sync()
    lender, borrower = fleet.engines
    style, tone = adapter_tensors(fleet.model, 41), adapter_tensors(fleet.model, 42)
    for engine in fleet.engines:
        call(engine, "abort", epoch=engine.report().epoch, reason="the sync job has stopped")
    start = max(engine.report().epoch for engine in fleet.engines)
    ahead = Epoch([lender], after=start)
    for name, tensors in (("style", style), ("new", tone)):
        fleet.version += 1
        ahead.adapter = adapter_spec(name, CONFIG)
        ahead.check(tensors)
        ahead.prepare(tensors, staged=True)
        ahead.transfer(tensors, fleet.version, staged=True)
        assert lender.report().state is WorkerState.SERVING
        (commit,) = ahead.all("commit", version=fleet.version, cache="Reset")
        assert (commit["state"], commit["cacheReset"]) == ("Serving", None)
        assert ahead.all("commit", version=fleet.version, cache="Reset")[0]["state"] == "Serving"
    ahead.close()
    base = make_model(fleet.model, 22)
    header = {"epoch": ahead.number, "version": fleet.version}
    call(borrower, "admit", **header)
    lent = call(lender, "lend", **header, wire=Wire.GLOO, deadlineSeconds=SECONDS)
    shown = {key: lent[key] for key in ("rendezvous", "shape", "adapters")}
    assert {held["spec"]["name"] for held in shown["adapters"]} >= {"new", "style"}
    call(borrower, "borrow", **header, **shown, wire=Wire.GLOO, deadlineSeconds=SECONDS, holdSeconds=SECONDS)
    call(borrower, "commit", **header, cache="Reset")
    call(borrower, "resume", epoch=ahead.number)
    assert borrower.report().adapters == lender.report().adapters
    for engine in fleet.engines:
        assert_says(fleet, "style", merged(fleet.model, 22, style), only=engine)
        assert_says(fleet, "new", merged(fleet.model, 22, tone), only=engine)
        assert_says(fleet, SERVED_NAME, base, only=engine)


def test_an_adapter_that_is_never_committed_leaves_nothing(fleet: HostFleet):
    engine = fleet.engines[0]
    epoch = Epoch([engine], after=engine.report().epoch)
    tensors = adapter_tensors(fleet.model, 51)
    epoch.adapter = adapter_spec("lost", CONFIG)
    epoch.check(tensors)
    epoch.prepare(tensors, staged=True)
    epoch.transfer(tensors, fleet.version + 1, staged=True)
    epoch.close()
    assert engine.report().state is WorkerState.SERVING
    assert "lost" not in engine.report().adapters
    with pytest.raises(urllib.error.HTTPError, match="404"):
        engine.generate(PROMPTS[0], TOKENS, "lost")
    folder = folder_of(engine)
    assert folder.exists()
    fleet.close()
    assert not folder.exists()
