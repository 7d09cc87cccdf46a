"""A clock that tests can put forward."""

import asyncio
import math

from rolloutfleet_sync.clock import Clock


class SkippingClock(Clock):
    """Runs with the event loop's clock, and jumps when told to; everybody who waits by it notices."""

    def __init__(self):
        self._skew = 0.0
        self._skipped = asyncio.Event()

    def now(self) -> float:
        return super().now() + self._skew

    def skip(self, seconds: float) -> None:
        self._skew += seconds
        self._skipped.set()
        self._skipped = asyncio.Event()

    async def wait(self, event: asyncio.Event, until: float) -> None:
        while not event.is_set() and self.now() < until:
            waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._skipped.wait())]
            try:
                timeout = None if math.isinf(until) else until - self.now()
                await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
