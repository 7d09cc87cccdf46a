"""Daemons: started detached, remembered by pid *and* start time, and never confused with somebody else's."""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster.cache import write_atomically
from localcluster.constants import MARKER

TERM_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that cannot be mistaken for a later one with the same pid: start time in ticks since `boot`."""

    pid: int
    start_ticks: int
    boot: str


@dataclass(frozen=True, slots=True)
class Record:
    """What the launcher remembers of a daemon. `digest` covers its command line and configuration."""

    name: str
    identity: Identity
    digest: str
    started_at: float


def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def parse_stat(text: str) -> tuple[str, int]:
    """State letter and start time in ticks out of /proc/PID/stat, whatever the command's name contains."""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def identify(pid: int) -> Identity | None:
    """Identity of a living process; None when it is gone or a zombie."""
    try:
        state, ticks = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else Identity(pid, ticks, boot_id())


def is_alive(identity: Identity) -> bool:
    """True while exactly this process lives; a recycled pid, or a pid from before a reboot, is not it."""
    return identify(identity.pid) == identity


def record_path(run: Path, name: str) -> Path:
    return run / f"{name}.json"


def write_record(run: Path, record: Record) -> None:
    write_atomically(record_path(run, record.name), json.dumps(asdict(record)))


def read_record(run: Path, name: str) -> Record | None:
    """The record of a daemon, or None when there is none (or a crash left an unreadable one)."""
    try:
        data = json.loads(record_path(run, name).read_text())
        return Record(data["name"], Identity(**data["identity"]), data["digest"], data["started_at"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def start(
    name: str, argv: Iterable[str], *, state: Path, log: Path, run: Path, digest: str, env: Mapping[str, str]
) -> Record:
    """Starts a daemon in a session of its own, output to `log`, and records it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            list(argv),
            env={**env, MARKER: str(state)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_raise_limits,
        )
    identity = identify(process.pid) or Identity(process.pid, 0, boot_id())
    record = Record(name, identity, digest, time.time())
    write_record(run, record)
    # The daemon outlives the launcher on purpose: no warning about a child that was not waited for.
    process.returncode = 0
    return record


def _raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _reap(pid: int) -> None:
    """Collects the daemon when it happens to be a child of this launcher: a zombie would look like a leftover."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _signal(identity: Identity, number: int) -> None:
    # pidfd closes the gap between "is it still ours?" and the signal.
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(identity):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def stop(identities: Iterable[Identity], seconds: float = TERM_SECONDS) -> None:
    """Ends exactly these processes: SIGTERM to all, SIGKILL to those alive after `seconds`; returns when gone."""
    left = list(identities)
    for number, wait in ((signal.SIGTERM, seconds), (signal.SIGKILL, 10.0)):
        for identity in left:
            _signal(identity, number)
        deadline = time.monotonic() + wait
        while left and time.monotonic() < deadline:
            for identity in left:
                _reap(identity.pid)
            left = [identity for identity in left if is_alive(identity)]
            if left:
                time.sleep(0.02)


def marked(state: Path) -> list[Identity]:
    """Living processes that carry this state folder's marker: daemons, shims, builders, recorded or not."""
    wanted = f"{MARKER}={state}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if wanted in environment.split(b"\0"):
            identity = identify(int(entry.name))
            if identity is not None:
                found.append(identity)
    return sorted(found, key=lambda identity: identity.pid)


def command_line(pid: int) -> str:
    """The command of a process for people to read; empty when it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, or a word that there is none."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"(no log at {log})"
