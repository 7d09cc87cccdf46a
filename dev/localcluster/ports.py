"""Ports are free before anything is started, or the error names who holds them."""

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

from localcluster.errors import LauncherError
from localcluster.processes import command_line

_LISTEN = "0A"


def parse_listeners(table: str) -> dict[tuple[str, int], int]:
    """(address, port) -> socket inode of every listening socket in the text of /proc/net/tcp or tcp6.

    IPv6 addresses that mean "every address" are given as "::".
    """
    listeners = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        raw, port = fields[1].split(":")
        words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
        packed = b"".join(words)
        address = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
        listeners[address.removeprefix("::ffff:"), int(port, 16)] = int(fields[9])
    return listeners


def listeners() -> dict[tuple[str, int], int]:
    """(address, port) -> socket inode of every listening TCP socket of this machine."""
    found: dict[tuple[str, int], int] = {}
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        if table.exists():
            found.update(parse_listeners(table.read_text()))
    return found


def _open_files(process: Path) -> set[str]:
    targets: set[str] = set()
    try:
        for handle in (process / "fd").iterdir():
            # One that was closed meanwhile (the listing's own, for a start) must not hide the others.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                targets.add(str(handle.readlink()))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return targets
    return targets


def holder(inode: int) -> str:
    """Who has a socket open: "pid 123 (command)", or a word that it cannot be seen."""
    wanted = f"socket:[{inode}]"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _open_files(entry):
            return f"pid {entry.name} ({command_line(int(entry.name))[:120] or 'command hidden'})"
    return "a process that this user may not see"


def require_free(wanted: Iterable[tuple[str, str, int]]) -> None:
    """Checks (component, address, port) triples.

    Raises LauncherError that names every port that is taken, what wanted it, and who holds it.
    """
    taken = listeners()
    complaints = []
    for component, address, port in sorted(wanted):
        for listening in (address, "0.0.0.0", "::"):
            inode = taken.get((listening, port))
            if inode is not None:
                complaints.append(f"port {port} on {listening}, wanted by {component}, is held by {holder(inode)}")
    if complaints:
        raise LauncherError("\n".join([*complaints, "end the holder, or run `down` if it is an older cluster of ours"]))
