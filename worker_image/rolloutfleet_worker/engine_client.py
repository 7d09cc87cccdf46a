"""Calls from the launcher to the middleware inside vLLM's API server."""

from collections.abc import Sequence
from typing import Any

import aiohttp

from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import SleepLevel, WakeTag
from rolloutfleet_worker.fence import Door
from rolloutfleet_worker.middleware import ENGINE_PREFIX, SECRET_HEADER
from rolloutfleet_worker.podbase import Swapped


class EngineClient:
    """The engine calls of one vLLM API server on this pod's own loopback."""

    def __init__(self, session: aiohttp.ClientSession, port: int, secret: str) -> None:
        self._session = session
        self._base = f"http://127.0.0.1:{port}{ENGINE_PREFIX}"
        self._headers = {SECRET_HEADER: secret}

    async def is_paused(self, deadline_seconds: float) -> bool:
        """Asks the engine's own loop, so that an answer is a sign of life too.

        Raises:
            ProblemError: no answer in time, or the engine is dead.
        """
        return bool((await self._call("health", {}, deadline_seconds))["paused"])

    async def count_serving(self, deadline_seconds: float) -> int:
        """How many requests that generate are in flight.

        Raises:
            ProblemError: no answer in time.
        """
        return int((await self._call("serving", {}, deadline_seconds))["requests"])

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> None:
        """Returns when no step of the model runs any more."""
        await self._call("pause", {"mode": mode.lower()}, deadline_seconds)

    async def resume(self, deadline_seconds: float) -> None:
        await self._call("resume", {}, deadline_seconds)

    async def reset_cache(self, deadline_seconds: float) -> bool:
        """vLLM's own answer; anything but a plain yes is a no."""
        return (await self._call("reset-cache", {}, deadline_seconds)).get("reset") is True

    async def set_door(self, door: Door, *, version: int, reason: str, deadline_seconds: float) -> None:
        """Say what happens to requests that generate, and which weight version their answers name."""
        await self._call("door", {"door": door, "version": version, "reason": reason}, deadline_seconds)

    async def swap(self, version: int, *, reset_cache: bool, pause: bool, deadline_seconds: float) -> Swapped:
        """Have every rank copy its staged version into the live weights between two steps.

        With ``pause`` the engine is stopped for just that long, and goes on unless the cache was to be reset and was not.

        Raises:
            ProblemError: a rank could not copy, or not in time; the engine stays stopped then.
        """
        body = {"version": version, "reset_cache": reset_cache, "pause": pause}
        answer = await self._call("swap", body, deadline_seconds)
        return Swapped(cache_reset=answer["reset"], pause_seconds=float(answer["pause_seconds"]))

    async def serve_adapter(self, name: str, version: int, deadline_seconds: float) -> float:
        """Have requests that name an adapter take this version of it; how many seconds no step could run meanwhile."""
        answer = await self._call("serve-adapter", {"name": name, "version": version}, deadline_seconds)
        return float(answer["pause_seconds"])

    async def withdraw_adapters(self, names: Sequence[str], deadline_seconds: float) -> None:
        """Requests that name these adapters are refused from now on."""
        await self._call("withdraw-adapters", {"names": list(names)}, deadline_seconds)

    async def refuses_sleep(self, deadline_seconds: float) -> str:
        """Why this engine cannot sleep; empty when it can."""
        return str((await self._call("sleepless", {}, deadline_seconds))["reason"])

    async def sleep(self, level: SleepLevel, deadline_seconds: float) -> None:
        """Requests in flight are aborted; returns when the device's memory is free."""
        await self._call("sleep", {"level": int(level)}, deadline_seconds)

    async def wake(self, tags: Sequence[WakeTag], deadline_seconds: float) -> None:
        """Returns when what the tags name is back; vLLM goes on generating once all of it is."""
        await self._call("wake", {"tags": list(tags)}, deadline_seconds)

    async def _call(self, verb: str, body: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        try:
            async with self._session.post(
                self._base + verb,
                json=body,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=deadline_seconds),
            ) as response:
                if response.status != 200:
                    raise ProblemError(
                        ProblemCode.ENGINE_FAILED,
                        f"vLLM answered {verb} with {response.status}: {(await response.text())[:1500]}",
                    )
                answer: dict[str, Any] = await response.json()
                return answer
        except TimeoutError as error:
            raise ProblemError(
                ProblemCode.DEADLINE_EXCEEDED, f"vLLM did not finish {verb} within {deadline_seconds:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise ProblemError(ProblemCode.ENGINE_FAILED, f"vLLM cannot be reached for {verb}: {error}") from error
