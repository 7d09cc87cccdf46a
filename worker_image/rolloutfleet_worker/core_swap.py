"""A swap as one call of vLLM's engine core: stop, copy, reset caches, go on, without a word from outside in between.

vLLM's core answers calls by the name of a method, between two steps of its loop. Its ``vllm.general_plugins`` are where methods of an
engine's side are added, and they are loaded in the core's process too.
"""

import time
from concurrent.futures import Future
from typing import Any

CORE_SWAP = "rolloutfleet_swap"
"""The method's name in vLLM's engine core."""


def install() -> None:
    """Add the method to vLLM's engine core in this process; doing it again changes nothing."""
    from vllm.v1.engine.core import EngineCoreProc

    setattr(EngineCoreProc, CORE_SWAP, swap)


def swap(core: Any, version: int, reset_cache: bool, pause: bool, resume: bool) -> "Future[dict[str, Any]]":
    """Have every rank copy its staged version into the live weights while no step runs or is under way.

    With ``pause`` the scheduler keeps its requests and stops once the steps in flight have ended, which asynchronous scheduling and
    pipelines have several of; without, it must be stopped already. The cache goes while it stands: frozen requests are preempted and
    computed anew, so that no block of older weights is ever read. With ``resume`` it goes on at once, unless anything has failed or the
    cache was not reset: then it stays stopped, for the launcher to close the door.

    The answer names ``reset`` (None where nothing was to be reset) and ``pause_seconds``, for which no step could run; or it raises what a
    rank or vLLM has raised.
    """
    answer: Future[dict[str, Any]] = Future()
    stopped = core.pause_scheduler("keep", False) if pause else None

    def act(paused: "Future[None] | None") -> None:
        try:
            if paused is not None:
                paused.result()
            answer.set_result(_swap_stopped(core, version, reset_cache, resume))
        except Exception as error:  # noqa: BLE001 - raised where the answer is asked for; a future's callback would only log it
            answer.set_exception(error)

    if stopped is None:
        act(None)
    else:
        # Called on the core's own thread, by its loop, when nothing is in flight any more.
        stopped.add_done_callback(act)
    return answer


def swap_rank(worker: Any, version: int) -> None:
    """One rank's part, on vLLM's own thread of it."""
    worker.start_weight_update()
    worker.update_weights({"version": version})
    worker.finish_weight_update()


def _swap_stopped(core: Any, version: int, reset_cache: bool, resume: bool) -> dict[str, Any]:
    from vllm.v1.engine import EngineCoreRequestType

    began = time.perf_counter()
    core.model_executor.collective_rpc(swap_rank, args=(version,))
    reset: bool | None = None
    if reset_cache:
        reset = bool(core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
        core.reset_encoder_cache()
    if resume and reset is not False:
        core.resume_scheduler()
        # The loop that has called this goes to sleep until something arrives, whatever there is to do by now.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    return {"reset": reset, "pause_seconds": time.perf_counter() - began}
