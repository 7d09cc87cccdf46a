"""The sync job's clock, so that tests can pass time instead of spending it."""

import asyncio
import math


class Clock:
    """Seconds that never go back, and waiting by them."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

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
