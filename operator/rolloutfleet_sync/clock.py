"""The sync job's clock, so that tests can pass time instead of spending it."""

import asyncio
import math
import time
from datetime import UTC, datetime


class Clock:
    """Seconds that never go back, and waiting by them."""

    _offset: float | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self, moment: float) -> datetime:
        """The time of day at a moment of this clock; the same for the same moment, however the machine's own clock is set meanwhile."""
        if self._offset is None:
            self._offset = time.time() - self.now()
        return datetime.fromtimestamp(self._offset + moment, UTC)

    async def wait(self, event: asyncio.Event, until: float) -> None:
        """Return once the event is set or the clock has reached ``until``."""
        if math.isinf(until):
            await event.wait()
            return
        try:
            async with asyncio.timeout_at(until):
                await event.wait()
        except TimeoutError:
            return
