"""Asks every engine all the time, and writes down what each answered: a version's weights, a refusal, or nothing.

Each line of the output is ``[asked, answered, engine, version, checksum, refusal]``, times by the monotonic clock.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any, TextIO

import aiohttp

PERIOD_SECONDS = 0.1


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> tuple[int, str, str]:
    """Version and what was computed, or why there is no answer."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                return -1, "", str(answer.get("error", {}).get("message", answer))[:300]
            said = answer["checksum"] if "checksum" in answer else json.dumps(answer["choices"][0]["token_ids"])
            return int(response.headers["x-rolloutfleet-weight-version"]), said, ""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        return -1, "", type(error).__name__


def _read(targets: Path) -> dict[str, Any]:
    """Where the engines are now: a pod in another's place has another address."""
    found: dict[str, Any] = json.loads(targets.read_text())
    return found


async def _watch(engine: int, targets: Path, output: TextIO) -> None:
    timeout = aiohttp.ClientTimeout(total=_read(targets)["seconds"])
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            known = _read(targets)
            asked = time.monotonic()
            version, said, refusal = await _ask(session, known["urls"][engine], known["body"])
            output.write(json.dumps([asked, time.monotonic(), engine, version, said, refusal]) + "\n")
            await asyncio.sleep(max(0.0, asked + PERIOD_SECONDS - time.monotonic()))


async def _run(engines: int, targets: Path, path: Path) -> None:
    with path.open("a", buffering=1) as output:
        await asyncio.gather(*(_watch(engine, targets, output) for engine in range(engines)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--targets", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(_run(options.engines, options.targets, options.output))


if __name__ == "__main__":
    main()
