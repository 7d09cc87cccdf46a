"""Ends the TCP connections of a gloo group, or to a store, from outside, which neither gloo nor torch's store offers a way to do.

A group's connections are known by their ports: gloo gives each group a device with one listening socket, every pair of members is
connected through the listener of one of the two, and members tell each other their listeners' addresses.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISSOCK

Endpoint = tuple[str, int]

_INTERNET = frozenset({socket.AF_INET, socket.AF_INET6})


def listening_endpoints() -> set[Endpoint]:
    """Addresses on which this process listens for TCP connections."""
    return {
        _endpoint(handle.getsockname())
        for handle in _tcp_sockets()
        if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def end_connections(listeners: set[Endpoint]) -> int:
    """Shuts down every TCP connection of this process that goes through one of the listeners; returns their number.

    File descriptors stay with their owner, which sees the end of the stream.
    """
    ended = 0
    for handle in _tcp_sockets():
        try:
            ends = {_endpoint(handle.getsockname()), _endpoint(handle.getpeername())}
            if ends & listeners:
                handle.shutdown(socket.SHUT_RDWR)
                ended += 1
        except OSError:
            continue  # not connected, or gone by itself in the meantime
    return ended


def _tcp_sockets() -> Iterator[socket.socket]:
    for entry in sorted(Path("/proc/self/fd").iterdir()):
        with _duplicate(int(entry.name)) as handle:
            if handle is not None and handle.family in _INTERNET and handle.type == socket.SOCK_STREAM:
                yield handle


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None  # closed between listing and looking
        return
    # The copy is looked at, not the original: another thread may close that and open a file in its place at any moment.
    if not S_ISSOCK(os.fstat(copy).st_mode):
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as handle:
        yield handle


def _endpoint(address: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    # Torch's store speaks IPv4 through sockets of IPv6, which show the addresses of both ends so.
    return address[0].removeprefix("::ffff:"), address[1]


__all__ = ["Endpoint", "end_connections", "listening_endpoints"]
