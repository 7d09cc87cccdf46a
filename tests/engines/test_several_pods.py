"""An engine of two pods, each a launcher with a vLLM of its own that finds the other: one engine to whoever asks, refits or ends it."""

import signal
from collections.abc import Iterator

import pytest
from tests.engines.hostfleet import SOON_SECONDS, HostFleet, await_that
from tests.engines.refitting import assert_generates, refit
from tests.engines.tinymodels import TIED, make_model, named_tensors, write_model

import rolloutfleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostFleet]:
    """Ready: one engine, TP = 2 over two pods."""
    folder = tmp_path_factory.mktemp("two-pods")
    made = HostFleet(folder, write_model(folder / "model", TIED), ranks=2, pods=2)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def trainer(fleet: HostFleet) -> Iterator[rolloutfleet.Fleet]:
    with fleet.connect() as connected:
        yield connected


@pytest.mark.row("A12", "A21", "A36", "B06")
@pytest.mark.scenario("F23")
def test_a_tensor_group_over_two_pods_gives_transformers_tokens_before_and_after_refits(
    fleet: HostFleet, trainer: rolloutfleet.Fleet
):
    assert_generates(fleet, 0)
    for seed in (11, 12):
        model = make_model(fleet.model, seed)
        refit(fleet, trainer, named_tensors(model))
        assert_generates(fleet, model)
    leader, follower = fleet.engines[0], fleet.followers[0]
    assert (leader.report().ranks, leader.report().devices) == (2, ("cpu", "cpu"))
    assert (follower.probe("started"), follower.probe("ready"), follower.probe("live")) == ("", "", "")


def test_a_version_that_is_staged_beside_the_live_one_is_swapped_on_all_pods(fleet: HostFleet):
    fleet.start_sync(staging="Auto")
    with fleet.connect() as trainer:
        model = make_model(fleet.model, 21)
        refit(fleet, trainer, named_tensors(model))
        assert_generates(fleet, model)


@pytest.mark.scenario("F49")
def test_the_engine_ends_as_a_whole_when_a_follower_is_killed_and_says_why(fleet: HostFleet):
    leader, follower = fleet.engines[0], fleet.followers[0]
    leader.vllm_processes()
    follower.vllm_processes()
    follower.process.send_signal(signal.SIGKILL)
    assert leader.process.wait(SOON_SECONDS) == 1
    assert f"pod {follower.name} of the engine: its launcher is gone" in leader.termination_log.read_text()
    await_that("nothing is left of either pod", lambda: not leader.vllm_processes() and not follower.vllm_processes())
