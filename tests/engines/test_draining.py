"""A launcher that is told to end while real vLLM generates: the request is answered, then everything ends."""

import json
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from tests.engines.hostfleet import SOON_SECONDS, TOKEN, Launched, await_that
from tests.engines.tinymodels import TIED, write_model

from rolloutfleet.contract.worker import WorkerState

TOKENS = 100


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("draining")
    model = write_model(folder / "model", TIED)
    arguments = [str(model), "--served-model-name=tiny", "--dtype=float32", "--enforce-eager", "--max-model-len=256"]
    launched = Launched(folder, [*arguments, "--num-gpu-blocks-override=64"], grace_seconds=90)
    launched.await_started()
    yield launched
    launched.stop()


def call(engine: Launched, verb: str, **fields: object) -> None:
    header = {"fleetUid": "fleet-uid", "podUid": "pod-0-uid", "instance": engine.report().instance, "epoch": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.control_port}/rolloutfleet/v1/worker/{verb}",
        data=json.dumps(header | fields).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SOON_SECONDS):
        pass


@pytest.mark.row("B34")
def test_requests_in_flight_are_answered_before_an_engine_that_was_told_to_end_has_ended(engine: Launched):
    call(engine, "admit", version=0)
    engine.await_ready()
    call(engine, "pause", mode="Keep", deadlineSeconds=60)
    answers: list[tuple[list[int], int]] = []
    request = threading.Thread(target=lambda: answers.append(engine.generate("The fleet is", TOKENS)))
    request.start()
    engine.process.terminate()
    await_that("it is not Ready", lambda: (engine.probe("ready") or "").startswith("Leaving: "))
    assert engine.probe("live") == ""
    assert engine.report().leaving
    assert engine.report().state is WorkerState.PAUSED
    assert not answers
    call(engine, "resume")
    request.join(SOON_SECONDS)
    assert [(len(tokens), version) for tokens, version in answers] == [(TOKENS, 0)]
    assert engine.process.wait(SOON_SECONDS) == 0
    assert engine.vllm_processes() == {}
    assert engine.termination_log.read_text() == ""
