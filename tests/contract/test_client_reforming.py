"""The client in refits that lose engines: the same call of ``refit`` returns with those that are left."""

import importlib.util
import threading
import time
from collections.abc import Iterator

import pytest

import rolloutfleet
from fakes.served_fleet import SOON, ServedFleet
from fakes.wires import GlooWire, MemoryWire
from rolloutfleet.contract.policy import RefitDeadlines, RefitPolicy, Transport
from rolloutfleet.contract.trainer import Phase, RefitView
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.errors import RefitFailed

no_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="real gloo groups need torch, which the worker image has"
)


@pytest.fixture(params=["memory", pytest.param("gloo", marks=no_torch)])
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedFleet]:
    running = ServedFleet(MemoryWire(monkeypatch) if request.param == "memory" else GlooWire())
    running.policy = RefitPolicy(
        transport=Transport.GLOO, deadlines=RefitDeadlines(forming_seconds=60, absent_seconds=1)
    )
    running.start_sync()
    yield running
    running.close()


@pytest.mark.scenario("F60")
@pytest.mark.scenario("F03")
@pytest.mark.parametrize("verb", ["join", "pause", "receive"])
def test_an_engine_that_fails_costs_the_others_nothing_but_time(setup: ServedFleet, verb: str) -> None:
    views: list[RefitView] = []
    setup.engines[1].refuse |= {verb: "out of memory", "lend": "no"}
    with setup.connect() as fleet:
        began = time.monotonic()
        result = fleet.refit(setup.weights(), version=1, progress=views.append)
        assert time.monotonic() - began < SOON
        assert result.members == (setup.engines[0].pod,)
        assert [lost.pod_name for attempt in result.attempts for lost in attempt.lost] == [setup.engines[1].pod]
        assert setup.engines[0].state is WorkerState.SERVING
        assert (setup.engines[0].version, setup.engines[0].digest) == (1, result.digest)
        assert setup.engines[1].version == 0
        assert [view.phase for view in views][-1] is Phase.COMPLETE
        assert {view.attempt for view in views} >= {2}
        setup.engines[1].refuse.clear()
        again = fleet.refit(setup.weights("b"), version=2)
        assert len(again.members) == 2
        assert again.attempts == ()


def test_a_trainer_whose_own_tensors_fail_in_the_second_attempt_says_so(setup: ServedFleet) -> None:
    broken = threading.Event()

    class Breaking(dict):
        def items(self):
            for index, item in enumerate(super().items()):
                if broken.is_set() and index == 2:
                    raise ArithmeticError("loss is NaN")
                yield item

    def break_in_the_second(view: RefitView) -> None:
        if view.attempt == 2:
            broken.set()

    setup.engines[1].refuse |= {"pause": "busy", "lend": "no"}
    with setup.connect() as fleet, pytest.raises(RefitFailed, match="loss is NaN") as caught:
        fleet.refit(Breaking(setup.weights()), version=1, progress=break_in_the_second)
    assert isinstance(caught.value.__cause__, ArithmeticError)


def test_a_trainer_that_leaves_between_two_attempts_ends_the_refit(setup: ServedFleet) -> None:
    setup.engines[1].refuse["receive"] = "out of memory"
    setup.engines[0].hold.add("pause")

    def leave(view: RefitView) -> None:
        if view.attempt == 2:
            raise KeyboardInterrupt

    with setup.connect() as fleet:
        setup.engines[0].hold.clear()
        with pytest.raises(KeyboardInterrupt):
            fleet.refit(setup.weights(), version=1, progress=leave)
        setup.wait_until(lambda state: state.active is None)
    assert setup.engines[0].version == 0


@no_torch
@pytest.mark.scenario("F60")
@pytest.mark.scenario("F71")
def test_a_process_killed_in_mid_transfer_leaves_the_call_to_return_with_the_survivors() -> None:
    import torch

    from fakes.process_fleet import ProcessFleet

    weights = {f"layer.{index}": torch.full((8 << 20,), float(index)) for index in range(8)}
    with ProcessFleet(3) as fleet, fleet.connect() as trainer:
        assert len(trainer.refit(weights, version=1).members) == 3
        killed = threading.Event()

        def kill(view: RefitView) -> None:
            if view.phase is Phase.TRANSFERRING and not killed.is_set():
                killed.set()
                fleet.kill(1)

        began = time.monotonic()
        result = trainer.refit(weights, version=2, progress=kill)
        assert time.monotonic() - began < SOON
        assert result.members == (fleet.names[0], fleet.names[2])
        assert [lost.pod_name for attempt in result.attempts for lost in attempt.lost] == [fleet.names[1]]
        view = trainer.view()
        assert [member.version for member in view.members if member.ready] == [2, 2]
        assert isinstance(trainer, rolloutfleet.Fleet)
