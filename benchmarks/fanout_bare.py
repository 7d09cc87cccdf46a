"""The calls of a refit made by nothing but aiohttp, in a process of their own: the floor of :mod:`benchmarks.fanout`.

``python -m benchmarks.fanout_bare PORTS`` reads a list of the engines' ports and then, a line at a time, ``at-once`` or ``in-turn``; each
is answered with the seconds of one round of all calls. What does not change from round to round is made before the clock starts.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence

import aiohttp

from benchmarks.fanout_engines import BARE, DIGEST
from benchmarks.processes import TOKEN
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.policy import CachePolicy, PauseMode
from rolloutfleet.contract.worker import Call, Commit, Pause, Receive, Resume


def calls_of(number: int, version: int) -> Mapping[str, Call]:
    """The calls that a refit makes to one engine while it stands still, by route, in their order."""
    header = {"fleet_uid": "fleet-uid", "pod_uid": f"pod-{number}", "instance": f"instance-{number}", "epoch": 1}
    return {
        "pause": Pause(**header, mode=PauseMode.KEEP, deadline_seconds=60.0),
        "receive": Receive(
            **header, version=version, manifest_digest=DIGEST, deadline_seconds=60.0, hold_seconds=240.0
        ),
        "commit": Commit(**header, version=version, cache=CachePolicy.RESET),
        "resume": Resume(**header),
    }


class Bare:
    """One session; connections are kept from call to call."""

    def __init__(self, http: aiohttp.ClientSession, ports: Sequence[int]) -> None:
        self._http = http
        by_engine = [
            [
                (f"http://127.0.0.1:{port}{API_PREFIX}/worker/{verb}", call.model_dump_json(by_alias=True).encode())
                for verb, call in calls_of(number, 7).items()
            ]
            for number, port in enumerate(ports)
        ]
        self._fan_outs = list(zip(*by_engine, strict=True))

    async def round(self, *, at_once: bool) -> float:
        """Seconds of every call once."""
        began = time.perf_counter()
        for fan_out in self._fan_outs:
            if at_once:
                await asyncio.gather(*(self._call(url, body) for url, body in fan_out))
            else:
                for url, body in fan_out:
                    await self._call(url, body)
        return time.perf_counter() - began

    async def _call(self, url: str, body: bytes) -> bytes:
        async with self._http.post(url, data=body) as response:
            response.raise_for_status()
            return await response.read()


async def serve(ports: Sequence[int]) -> None:
    """Measure as the lines of standard input ask; each round is preceded by one that opens the connections."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", BARE: "1"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as http:
        bare = Bare(http, ports)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await bare.round(at_once=True)
            print(await bare.round(at_once=line.strip() == "at-once"), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
