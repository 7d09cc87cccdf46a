"""The swap inside vLLM's engine core, with a core that is stopped by hand."""

import queue
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not part of the development environment; the worker image has it")

from vllm.v1.engine import EngineCoreRequestType

from rolloutfleet_worker.core_swap import CORE_SWAP, install, swap, swap_rank


class Core:
    """What the swap needs of vLLM's core, and the order in which it asks for it."""

    def __init__(self, *, busy: bool = False) -> None:
        self.done: list[Any] = []
        self.idle: Future[None] | None = Future() if busy else None
        self.resets: bool | Exception = True
        self.failure: Exception | None = None
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.model_executor = self

    def pause_scheduler(self, mode: str, clear_cache: bool) -> "Future[None] | None":  # vLLM's own signature
        self.done.append(("pause", mode, clear_cache))
        return self.idle

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> None:
        if self.failure:
            raise self.failure
        self.done.append((method, *args))

    def reset_prefix_cache(self, **options: bool) -> bool:
        self.done.append(("reset", options))
        if isinstance(self.resets, Exception):
            raise self.resets
        return self.resets

    def reset_encoder_cache(self) -> None:
        self.done.append(("reset-encoder",))

    def resume_scheduler(self) -> None:
        self.done.append(("resume",))


ALL = [
    ("pause", "keep", False),
    (swap_rank, 8),
    ("reset", {"reset_running_requests": True, "reset_connector": True}),
    ("reset-encoder",),
    ("resume",),
]


def test_a_core_with_nothing_in_flight_swaps_at_once_and_goes_on():
    core = Core()
    answer = swap(core, 8, True, True, True).result(0)
    assert core.done == ALL
    assert answer["reset"] is True
    assert answer["pause_seconds"] >= 0
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)


def test_steps_in_flight_end_before_anything_is_copied():
    core = Core(busy=True)
    answer = swap(core, 8, True, True, True)
    assert core.done == ALL[:1]
    assert not answer.done()
    core.idle.set_result(None)
    assert answer.result(0)["reset"] is True
    assert core.done == ALL


def test_a_core_that_is_stopped_already_stays_so():
    core = Core()
    assert swap(core, 8, False, False, False).result(0)["reset"] is None
    assert core.done == [(swap_rank, 8)]
    assert core.input_queue.empty()


@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_fails_leaves_the_core_stopped_and_the_cache_alone(busy: bool):
    core = Core(busy=busy)
    core.failure = RuntimeError("local rank 1 has version 6 staged, not 8")
    answer = swap(core, 8, True, True, True)
    if core.idle is not None:
        core.idle.set_result(None)
    with pytest.raises(RuntimeError, match="has version 6 staged"):
        answer.result(0)
    assert core.done == ALL[:1]
    assert core.input_queue.empty()


def test_a_pause_that_fails_leaves_the_weights_alone():
    core = Core(busy=True)
    answer = swap(core, 8, True, True, True)
    core.idle.set_exception(RuntimeError("the device is lost"))
    with pytest.raises(RuntimeError, match="the device is lost"):
        answer.result(0)
    assert core.done == ALL[:1]


@pytest.mark.scenario("F53")
@pytest.mark.parametrize("resets", [False, RuntimeError("requests wait for remote blocks")])
def test_a_cache_that_is_not_reset_leaves_the_core_stopped(resets: "bool | Exception"):
    core = Core()
    core.resets = resets
    answer = swap(core, 8, True, True, True)
    if isinstance(resets, Exception):
        with pytest.raises(RuntimeError, match="requests wait"):
            answer.result(0)
    else:
        assert answer.result(0)["reset"] is False
    assert ("resume",) not in core.done


def test_vllms_core_has_all_that_is_asked_of_it():
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    install()
    install()
    assert getattr(EngineCoreProc, CORE_SWAP) is swap
    for name in ("pause_scheduler", "resume_scheduler", "reset_prefix_cache", "reset_encoder_cache"):
        assert callable(getattr(DPEngineCoreProc, name))


def test_a_rank_swaps_by_vllms_own_three_steps():
    class Worker:
        def __init__(self) -> None:
            self.done: list[Any] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *given: self.done.append((name, *given))

    worker = Worker()
    swap_rank(worker, 8)
    assert worker.done == [("start_weight_update",), ("update_weights", {"version": 8}), ("finish_weight_update",)]
