"""A launcher whose vLLM does not start says why where the kubelet reads it, and ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.hostfleet import START_SECONDS, Launched
from tests.engines.tinymodels import TIED, write_model


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launched]]:
    folder = tmp_path_factory.mktemp("refused")
    model: Path = write_model(folder / "model", TIED)
    arguments = {
        "argument": [str(model), "--no-such-argument=1"],
        "model": [str(folder / "nowhere")],
        "length": [str(model), "--max-model-len=100000"],
    }
    launched = {kind: Launched(folder, each, engine=index) for index, (kind, each) in enumerate(arguments.items())}
    yield launched
    for launcher in launched.values():
        launcher.stop()


@pytest.mark.parametrize(
    ("kind", "words"),
    [("argument", "--no-such-argument=1"), ("model", "nowhere"), ("length", "100000")],
)
def test_the_launcher_ends_with_the_cause_in_its_termination_message(
    refused: dict[str, Launched], kind: str, words: str
):
    launcher = refused[kind]
    assert launcher.process.wait(START_SECONDS) == 1
    reason = launcher.termination_log.read_text()
    assert words in reason.splitlines()[0]
    assert reason in launcher.log.read_text()
    assert launcher.probe("live") is None
