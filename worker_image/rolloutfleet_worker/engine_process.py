"""vLLM as a child process: how it is started, what it said last, how it is ended."""

import asyncio
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
_NO_CAUSE = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine core proc", "raise ")


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command that serves with stock vLLM, our transfer engine and our middleware."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        *arguments,
        f'--weight-transfer-config={{"backend": "{TRANSFER_BACKEND}"}}',
        "--middleware=rolloutfleet_worker.middleware.FleetMiddleware",
        f"--disable-access-log-for-endpoints={ENGINE_PREFIX}health,{ENGINE_PREFIX}fence,/health,/metrics",
    ]


def root_cause(lines: Sequence[str]) -> str:
    """The line of vLLM's output that says why it ended: the first error of the last traceback that is not a mere consequence."""
    causes = [match.group(1).strip() for line in lines if (match := _ERROR_LINE.search(line))]
    telling = [cause for cause in causes if not any(word in cause for word in _NO_CAUSE)]
    if telling:
        return telling[0]
    return causes[-1] if causes else next((line.strip() for line in reversed(lines) if line.strip()), "no output")


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

    def recent_error(self, seconds: float) -> str:
        """The root cause among the errors of the last seconds, or an empty string; older ones it has survived."""
        since = time.monotonic() - seconds
        lines = [line for written, line in self._lines if written >= since and _ERROR_LINE.search(line)]
        return root_cause(lines) if lines else ""

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
