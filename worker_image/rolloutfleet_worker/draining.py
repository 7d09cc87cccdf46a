"""The end of an engine that was told to end: out of the refit at once, out of the Service, and not before its requests are answered."""

import asyncio
import logging
from typing import Protocol

from rolloutfleet.contract.problems import ProblemError
from rolloutfleet_worker.podbase import PodBase

log = logging.getLogger(__name__)

LEAST_SECONDS = 3.0
"""After an engine is Ready no more, requests are still routed to it for about this long."""
LOOK_SECONDS = 0.25
CALL_SECONDS = 5.0


class Counting(Protocol):
    """What is asked of vLLM."""

    async def count_serving(self, deadline_seconds: float) -> int: ...


async def drain(pod: PodBase, engine: Counting, exited: "asyncio.Future[int]", seconds: float) -> None:
    """Returns when nothing is left to finish, when vLLM has ended, or after so many seconds.

    Args:
        pod: told to leave; a version that it holds whole and uncommitted is waited for.
        engine: requests in flight are counted here.
        exited: done when vLLM has ended.
        seconds: none or fewer end the engine's part in a refit alone, and wait for nothing.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    routed = not pod.fence.unready_reason()
    try:
        async with asyncio.timeout(max(seconds, CALL_SECONDS)):
            await pod.leave("the pod has been told to end")
    except (ProblemError, TimeoutError) as error:
        log.warning("the refit could not be left: %s", error)
    until, least = began + seconds, began + (min(seconds, LEAST_SECONDS) if routed else 0.0)
    while not exited.done() and (now := loop.time()) < until:
        if now >= least and not pod.owes_an_end and await _serving(engine) == 0:
            log.info("nothing is left to finish after %.1f s", now - began)
            return
        await asyncio.wait({exited}, timeout=LOOK_SECONDS)
    if seconds > 0 and not exited.done():
        log.warning("not all was finished within %.0f s; requests in flight end now", seconds)


async def _serving(engine: Counting) -> int:
    try:
        return await engine.count_serving(CALL_SECONDS)
    except ProblemError as problem:
        log.warning("requests in flight cannot be counted: %s", problem)
        return 0
