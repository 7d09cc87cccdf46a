"""vLLM as a child process: how it is started, what it said last, how it is ended."""

import asyncio
import itertools
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rolloutfleet_worker.middleware import ENGINE_PREFIX
from rolloutfleet_worker.plugin import TRANSFER_BACKEND

_KEPT_LINES = 400
_ERROR_LINE = re.compile(
    r"(?:^|\s)((?:[A-Za-z_][\w.]*(?:Error|Exception)\b|vllm(?: serve)?: error|api_server\.py: error|\S+: error): ?.*)$"
)
_NO_CAUSE = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Engine core proc",
    "EngineDeadError",
    "raise ",
)
_VALIDATION = re.compile(r"\d+ validation errors? for ")


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command that serves with stock vLLM, our transfer engine and our middleware, or runs ranks alone with ``--headless``."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        *arguments,
        f'--weight-transfer-config={{"backend": "{TRANSFER_BACKEND}"}}',
        # The door is one server's; vLLM would start one for each data parallel rank.
        *([] if "--headless" in arguments else ["--api-server-count=1"]),
        "--middleware=rolloutfleet_worker.middleware.FleetMiddleware",
        f"--disable-access-log-for-endpoints={ENGINE_PREFIX}health,{ENGINE_PREFIX}fence,/health,/metrics",
    ]


def find_cause(lines: Sequence[str]) -> str:
    """The first error that is not a mere consequence, or an empty string."""
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        match = _ERROR_LINE.search(line)
        if match and not any(word in match[1] for word in _NO_CAUSE):
            # pydantic names the model on one line, and says what is wrong with it on the next.
            detail = following.strip().partition(" [type=")[0] if _VALIDATION.search(match[1]) else ""
            return " ".join(filter(None, (match[1].strip(), detail)))
    return ""


def root_cause(lines: Sequence[str]) -> str:
    """The line of vLLM's output that says why it did not come up; without an error in it, the last one."""
    errors = [match[1].strip() for line in lines if (match := _ERROR_LINE.search(line))]
    written = [line.strip() for line in lines if line.strip()]
    return find_cause(lines) or (errors or written or ["no output"])[-1]


class EngineProcess:
    """The running child; ``exited`` resolves to its exit code."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[tuple[float, str]] = deque(maxlen=_KEPT_LINES)
        self._reader = asyncio.create_task(self._tee(), name="engine-output")

    @classmethod
    async def start(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> "EngineProcess":
        """Start vLLM in a process group of its own.

        Raises:
            OSError: the interpreter cannot be started.
        """
        process = await asyncio.create_subprocess_exec(
            *serve_command(arguments),
            env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=1 << 20,
        )
        return cls(process)

    async def exited(self) -> int:
        code = await self._process.wait()
        await asyncio.wait({self._reader}, timeout=2)
        return code

    def last_words(self) -> str:
        """Why vLLM ended, from all that is kept of its output: right for one that never came up."""
        return root_cause([line for _, line in self._lines])

    def error_since(self, moment: float) -> str:
        """The cause among the errors written since a moment of the monotonic clock, or an empty string."""
        return find_cause([line for written, line in self._lines if written >= moment])

    async def stop(self, grace_seconds: float) -> None:
        """Ask the whole process group to end, then make it."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_seconds)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def kill(self) -> None:
        """End every process of the engine at once: the last resort when a collective cannot be aborted."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    async def _tee(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while line := await _line(stream):
            text = line.decode(errors="replace")
            sys.stdout.write(text)
            sys.stdout.flush()
            self._lines.append((time.monotonic(), text.rstrip("\n")))


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:
        # A line longer than the buffer: hand on what is there, so that the child never blocks on a full pipe.
        return await stream.read(1 << 20)
