"""A steady load on one engine, in a process of its own: streams that each ask for the next completion as soon as one has ended.

As a program it writes, per token, when it came (monotonic clock, the same for all processes of a machine) and on which stream::

    python3 -m benchmarks.load --url http://127.0.0.1:8000 --streams 32 --output tokens.bin

:class:`Load` runs it and reads what it has written.
"""

import argparse
import asyncio
import json
import math
import random
import signal
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from benchmarks.processes import SERVED_NAME, Program

_TOKEN = struct.Struct("<dHH")
"""Seconds, stream, tokens that came together."""
_PROMPT_TOKENS = 32
_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came together on one stream; none means that the engine refused a request, or broke one off."""

    seconds: float
    stream: int
    tokens: int


class Load:
    """The load, from its first tokens on, until :meth:`stop`."""

    def __init__(self, folder: Path, url: str, streams: int, tokens: int) -> None:
        self._output = folder / "tokens.bin"
        self._program = Program(
            folder / "load.log",
            [
                *("-m", "benchmarks.load", "--url", url, "--streams", str(streams)),
                *("--tokens", str(tokens), "--output", str(self._output)),
            ],
        )

    def await_tokens(self, count: int, seconds: float = 120.0) -> None:
        """Return when at least so many tokens have come."""
        deadline = time.monotonic() + seconds
        while not self._output.exists() or self._output.stat().st_size < count * _TOKEN.size:
            if self._program.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the load gave no {count} tokens within {seconds:g} s:\n{self._program.tail()}")
            time.sleep(0.05)

    def stop(self) -> list[Arrival]:
        """End the load and return all that came."""
        self._program.stop()
        return read(self._output)


def read(path: Path) -> list[Arrival]:
    """All arrivals of a file, in the order in which they came."""
    content = path.read_bytes()
    return [Arrival(*fields) for fields in _TOKEN.iter_unpack(content[: len(content) // _TOKEN.size * _TOKEN.size])]


def tokens_per_second(arrivals: Iterable[Arrival], begin: float, end: float) -> float:
    """Tokens per second of all streams together, between two times."""
    if end <= begin:
        raise ValueError(f"a window from {begin:g} s to {end:g} s has no length")
    return sum(arrival.tokens for arrival in arrivals if begin <= arrival.seconds < end) / (end - begin)


def latencies(arrivals: Iterable[Arrival], begin: float, end: float) -> list[float]:
    """Seconds between neighbouring tokens of one stream, for those that came between two times, sorted.

    A gap between two completions of a stream counts too: the next one's first token came that much later.
    """
    last: dict[int, float] = {}
    gaps: list[float] = []
    for arrival in sorted((arrival for arrival in arrivals if arrival.tokens), key=lambda arrival: arrival.seconds):
        if arrival.stream in last and begin <= arrival.seconds < end:
            gaps.append(arrival.seconds - last[arrival.stream])
        last[arrival.stream] = arrival.seconds
    return sorted(gaps)


def refusals(arrivals: Iterable[Arrival], begin: float, end: float) -> int:
    """Requests that the engine refused or broke off, between two times."""
    return sum(1 for arrival in arrivals if not arrival.tokens and begin <= arrival.seconds < end)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of a sorted sequence lies (nearest rank); ValueError when it is empty."""
    if not ordered:
        raise ValueError("no values, so there is no percentile")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def _stream(client: httpx.AsyncClient, url: str, stream: int, tokens: int, output: BinaryIO) -> None:
    # The stream's number decides its prompts, so that two runs of a load ask the same.
    choose = random.Random(stream)
    while True:
        body = {
            "model": SERVED_NAME,
            "prompt": [choose.randrange(1, 250) for _ in range(_PROMPT_TOKENS)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        came = time.monotonic()
                        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                            if count := len(choice.get("token_ids") or []):
                                output.write(_TOKEN.pack(came, stream, count))
        except httpx.HTTPError:
            output.write(_TOKEN.pack(time.monotonic(), stream, 0))
            await asyncio.sleep(_RETRY_SECONDS)


async def _run(url: str, streams: int, tokens: int, path: Path) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with path.open("wb", buffering=0) as output:
        async with httpx.AsyncClient(timeout=120.0, limits=limits, trust_env=False) as client:
            tasks = [
                asyncio.create_task(_stream(client, url, stream, tokens + 7 * stream, output))
                for stream in range(streams)
            ]
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: [task.cancel() for task in tasks])
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(_run(options.url, options.streams, options.tokens, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
