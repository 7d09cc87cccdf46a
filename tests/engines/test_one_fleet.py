"""Two engines of one model: refits, what they refuse, and what they do when a party stops or dies in the middle."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engines.hostfleet import SOON_SECONDS, HostFleet, Launched, await_that
from tests.engines.refitting import PROMPTS, TOKENS, assert_generates, refit
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet
from rolloutfleet.buckets import plan_buckets
from rolloutfleet.contract.policy import RefitDeadlines
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.sources import NamedTensors

REPOSITORY = Path(__file__).parents[2]
TRANSFER_SECONDS = 5


@pytest.mark.row("B12")
@pytest.mark.row("B-C6")
@pytest.mark.row("A35")
@pytest.mark.row("A38")
@pytest.mark.scenario("F46")
@pytest.mark.scenario("F59")
def test_refits_in_a_row_give_transformers_tokens_on_both_engines(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    assert_generates(fleet, 0)
    results = []
    for seed in (11, 12, 11):
        model = make_model(fleet.model, seed)
        tensors = named_tensors(model)
        assert len(plan_buckets(NamedTensors(tensors).manifest())) == 3
        results.append(refit(fleet, trainer, tensors))
        assert_generates(fleet, model)
    first, second, again = results
    assert first.epoch == second.epoch == again.epoch
    assert first.live_digest == again.live_digest != second.live_digest
    assert first.digest == again.digest != second.digest


def test_tensors_of_a_smaller_dtype_are_cast_to_the_engines(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    model = make_model(fleet.model, 21).to(torch.bfloat16)
    refit(fleet, trainer, named_tensors(model))
    assert_generates(fleet, model.to(torch.float32))


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


WRONG = [
    (
        lambda tensors: without(tensors, "model.layers.0.self_attn.k_proj.weight"),
        "missing: model.layers.0.self_attn.k_proj.weight",
    ),
    (
        lambda tensors: without(tensors, "model.layers.1.self_attn.v_proj.bias"),
        "missing: model.layers.1.self_attn.v_proj.bias",
    ),
    (lambda tensors: without(tensors, "lm_head.weight"), "missing: lm_head.weight"),
    (
        lambda tensors: tensors | {"model.layers.0.nonsense.weight": torch.zeros(3), "nonsense": torch.zeros(1)},
        "extra: model.layers.0.nonsense.weight, nonsense",
    ),
    (
        lambda tensors: tensors | {"model.norm.weight": torch.zeros(255)},
        "tensor model.norm.weight has shape [255], the model takes [256]",
    ),
    (
        lambda tensors: tensors | {"model.embed_tokens.weight": torch.zeros(66_047, 256)},
        "tensor model.embed_tokens.weight has shape [66047, 256]",
    ),
    (
        lambda tensors: tensors | {"model.layers.1.self_attn.q_proj.weight": torch.zeros(256, 255)},
        "tensor model.layers.1.self_attn.q_proj.weight has shape [256, 255], which does not fit its part of",
    ),
    (
        lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 256)},
        "tensor model.layers.0.mlp.up_proj.weight has shape [128, 256], which does not fit its part of",
    ),
    (
        lambda tensors: (
            without(tensors, "model.norm.weight") | {"lm_head.weight": torch.zeros(1), "nonsense": torch.zeros(1)}
        ),
        "missing: model.norm.weight; extra: nonsense; wrong shape: tensor lm_head.weight has shape [1]",
    ),
]


@pytest.mark.row("B09")
@pytest.mark.scenario("F41")
@pytest.mark.row("A37")
def test_wrong_manifests_are_named_and_the_engines_go_on_serving(fleet: HostFleet, trainer: rolloutfleet.Fleet):
    model = make_model(fleet.model, 31)
    refit(fleet, trainer, named_tensors(model))
    for change, words in WRONG:
        with pytest.raises(rolloutfleet.ManifestMismatch) as caught:
            trainer.refit(change(named_tensors(model)), version=fleet.version + 1, timeout=SOON_SECONDS)
        assert words in str(caught.value)
        assert {engine.report().state for engine in fleet.engines} == {WorkerState.SERVING}
    assert_generates(fleet, model)
    refit(fleet, trainer, named_tensors(make_model(fleet.model, 32)))
    assert_generates(fleet, 32)


@pytest.mark.row("A43")
@pytest.mark.row("A46")
def test_tokens_and_log_probabilities_of_a_batch_are_those_of_the_trainers_own_model(
    fleet: HostFleet, trainer: rolloutfleet.Fleet
):
    model = make_model(fleet.model, 41)
    refit(fleet, trainer, named_tensors(model))
    prompts = torch.randint(0, 256, (4, 20), generator=torch.Generator().manual_seed(1))
    answer = trainer.generate(prompts, [20] * 4, greedy=True, sampling=rolloutfleet.Sampling(max_new_tokens=TOKENS))
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=TOKENS, do_sample=False)
    assert answer["output_ids"] == expected.tolist()
    with torch.no_grad():
        scores = torch.log_softmax(model(expected).logits[:, 19:-1], dim=-1)
    wanted = scores.gather(2, expected[:, 20:, None])[:, :, 0]
    torch.testing.assert_close(torch.tensor(answer["logprobs"])[:, 20:], wanted, atol=1e-4, rtol=1e-4)
    assert set(answer["engines"]) == {engine.name for engine in fleet.engines}
    assert set(answer["weight_versions"]) == {fleet.version}


@pytest.fixture
def hasty_fleet(fleet: HostFleet) -> Iterator[HostFleet]:
    """The fleet with a sync job that gives a transfer a few seconds."""
    fleet.start_sync(deadlines=RefitDeadlines(transferring_seconds=TRANSFER_SECONDS))
    yield fleet
    fleet.start_sync()


@pytest.mark.scenario("F02")
@pytest.mark.scenario("F45")
@pytest.mark.scenario("F68")
@pytest.mark.parametrize("sync_stops_too", [False, True], ids=["trainer stops", "trainer and sync job stop"])
def test_engines_leave_a_transfer_that_stands_still_and_the_next_refit_heals_them(
    hasty_fleet: HostFleet, sync_stops_too: bool
):
    fleet = hasty_fleet
    command = [sys.executable, "-m", "tests.engines.stopping_trainer"]
    command += [fleet.address, str(fleet.model), str(fleet.version + 1)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as stopped:
        try:
            await_that("the trainer has stopped", lambda: _is_stopped(stopped), 2 * SOON_SECONDS)
            assert {engine.report().state for engine in fleet.engines} == {WorkerState.RECEIVING}
            if sync_stops_too:
                fleet.sync.send_signal(signal.SIGSTOP)
            for engine in fleet.engines:
                engine.await_state(WorkerState.DIRTY)
                assert_refuses(engine)
            fleet.sync.send_signal(signal.SIGCONT)
        finally:
            stopped.send_signal(signal.SIGCONT)
            said, _ = stopped.communicate(timeout=SOON_SECONDS)
    failure = json.loads(said)
    assert failure["error"] == "RefitFailed"
    assert failure["phase"] == "Transferring"
    assert f"version {fleet.version + 1}" in failure["message"]
    assert fleet.status()["version"] == fleet.version
    fleet.start_sync()
    with fleet.connect() as trainer:
        assert refit(fleet, trainer, named_tensors(make_model(fleet.model, 51))).version == fleet.version
    assert_generates(fleet, 51)
    assert [engine.probe("ready") for engine in fleet.engines] == ["", ""]


def _is_stopped(process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, "the trainer ended before it stopped"
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def assert_refuses(engine: Launched) -> None:
    """Alive, not Ready, and generating for nobody."""
    assert engine.probe("live") == ""
    assert engine.probe("ready").startswith("Dirty: ")
    with pytest.raises(urllib.error.HTTPError) as refusal:
        engine.generate(PROMPTS[0], TOKENS)
    assert refusal.value.code == 503
    message = json.load(refusal.value)["error"]["message"]
    assert message.startswith(f"engine {engine.name} does not generate now: Dirty: ")


@pytest.mark.row("B34")
@pytest.mark.scenario("F72")
def test_an_engine_whose_core_is_killed_is_neither_alive_nor_ready_and_its_launcher_says_why(fleet: HostFleet):
    lost, other = fleet.engines[1], fleet.engines[0]
    (core,) = (pid for pid, title in lost.vllm_processes().items() if title.startswith("VLLM::EngineCor"))
    assert (lost.probe("live"), lost.probe("ready")) == ("", "")
    os.kill(core, signal.SIGKILL)
    await_that("liveness fails", lambda: lost.probe("live") != "", 30)
    assert lost.probe("ready") != ""
    assert lost.process.wait(SOON_SECONDS) == 1
    assert (lost.probe("live"), lost.probe("ready")) == (None, None)
    assert lost.vllm_processes() == {}
    reason = lost.termination_log.read_text()
    assert reason.startswith("the process of local rank 0 ended")
    assert reason in lost.log.read_text()
    assert other.generate(PROMPTS[0], TOKENS)[1] == fleet.version
    assert other.probe("live") == ""


@pytest.mark.row("B03")
def test_nothing_of_an_engine_outlives_its_killed_launcher(fleet: HostFleet):
    engine = fleet.engines[0]
    assert len(engine.vllm_processes()) >= 2
    engine.process.kill()
    await_that("vLLM's processes have ended", lambda: not engine.vllm_processes())
