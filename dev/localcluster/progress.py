"""What the user sees while something takes long, and the one way to run an external command."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from localcluster.constants import MARKER
from localcluster.errors import LauncherError

HEARTBEAT_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def say(text: str) -> None:
    """One line for the user, on standard error so that standard output stays machine-readable."""
    print(text, file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(
    argv: Sequence[str],
    *,
    state: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    seconds: float = 120,
) -> str:
    """Standard output of a short command.

    The command carries the launcher's marker and dies with the launcher. Raises LauncherError with the
    command and the end of its error output when it fails or outlives `seconds`.
    """
    try:
        done = subprocess.run(
            list(argv),
            env={**os.environ, **(env or {}), MARKER: str(state)},
            cwd=cwd,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=seconds,
            preexec_fn=_die_with_parent,
        )
    except FileNotFoundError as error:
        raise LauncherError(f"{argv[0]}: not found; install it, or run `up` as root so that it is installed") from error
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"`{' '.join(argv)}` did not end within {seconds:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise LauncherError(f"`{' '.join(argv)}` ended with {done.returncode}:\n{tail}")
    return done.stdout


def run_long(
    what: str,
    argv: Sequence[str],
    *,
    state: Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    counting: str = "lines",
    seconds: float = 3600,
) -> None:
    """Runs a long command into `log`, saying every 10 s how long it has run and how many `counting` it printed.

    Raises LauncherError with the last lines of the log when the command fails or outlives `seconds`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"{what} (log: {log})")
    begin = time.monotonic()
    lines = 0
    last = ""
    with log.open("w") as sink:
        process = subprocess.Popen(
            list(argv),
            env={**os.environ, **(env or {}), MARKER: str(state)},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_die_with_parent,
        )

        def copy() -> None:
            nonlocal lines, last
            assert process.stdout is not None
            with process.stdout as output:
                for line in output:
                    lines += 1
                    last = line.strip() or last
                    sink.write(line)

        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        while True:
            reader.join(HEARTBEAT_SECONDS)
            elapsed = time.monotonic() - begin
            if not reader.is_alive():
                break
            if elapsed > seconds:
                process.kill()
                raise LauncherError(f"{what}: not done within {seconds:.0f} s; see {log}")
            say(f"  {what}: {elapsed:.0f} s, {lines} {counting}{f', now {last[:90]}' if last else ''}")
        code = process.wait()
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise LauncherError(f"{what}: `{argv[0]}` ended with {code}; the last lines of {log}:\n{tail}")
    say(f"  {what}: done in {time.monotonic() - begin:.1f} s")
