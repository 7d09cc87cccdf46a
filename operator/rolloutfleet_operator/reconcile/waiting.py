"""Waiting for the first of several things, and never longer than a loop may sleep."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Stopper(Protocol):
    """Tells a loop to end: true, and its wait returns, once it should."""

    def __bool__(self) -> bool: ...

    async def wait(self) -> None:
        """Returns once the loop should end."""


async def unless_stopped(stopped: Stopper, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The work's result, or None when the loop was told to end first; the work is cancelled then, which passes endure."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, stop):
            if not pending.done():
                pending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pending


async def sleep_until_woken(stopped: Stopper, flag: asyncio.Event, seconds: float) -> None:
    """Returns when the flag is set, the time is over or the loop should end."""

    async def woken() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await flag.wait()

    await unless_stopped(stopped, woken())
