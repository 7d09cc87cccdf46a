"""Who of a group is still there: one idle TCP connection from every rank to rank 0, which ends when a process does.

NCCL between GPUs of one machine does not notice that a peer's process is gone: its kernels wait for ever; nor does gloo in the middle of a
send. Here the end of the peer's socket is seen within milliseconds, and keep-alive probes find a machine that vanished without a word.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from torch.distributed import Store

from rolloutfleet.exiting import start_thread
from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.transport.group import MemberGone, seconds_left
from rolloutfleet.transport.store import await_value, publish

_KEY: Final = "watch"
_POLL_SECONDS: Final = 0.1
_GO: Final = b"\n"

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)

Lost = Callable[[str, int | None], None]


class Watch:
    """The connections of one member: rank 0 has one to every other rank, which have one to rank 0."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._peers = dict(peers)
        self._closing = threading.Event()
        self._watched = False
        for peer in self._peers.values():
            peer.settimeout(None)
            for level, option, value in _KEEPALIVE:
                peer.setsockopt(level, option, value)

    def start(self, lost: Lost) -> None:
        """Calls ``lost`` once, on a thread of its own, with a sentence that names the member that has left, and with its rank where it
        left without a word."""
        self._watched = True
        start_thread("rolloutfleet-watch", lambda: self._run(lost), self.close)

    def raise_if_lost(self) -> None:
        """Before :meth:`start`: raises ConnectionError when a member has left."""
        for rank, peer in self._peers.items():
            try:
                word = peer.recv(1024, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                word = b""
            if not word:
                raise MemberGone(f"rank {rank} is gone", rank)
            raise ConnectionError(word.decode(errors="replace"))

    def close(self, reason: str = "") -> None:
        """Leaves; the others are told that this member is gone, or why the group ended."""
        if self._closing.is_set():
            return
        self._closing.set()
        for peer in self._peers.values():
            try:
                peer.sendall(reason.encode()[:1024])
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # that one is gone already
            if not self._watched:  # else the thread closes it: a closed descriptor must not lie in its selector
                peer.close()

    def _run(self, lost: Lost) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            words: dict[int, bytes] = dict.fromkeys(self._peers, b"")
            while self._peers:
                for key, _ in selector.select():
                    rank = int(key.data)
                    word = _read(self._peers[rank])
                    words[rank] += word
                    if word:
                        continue
                    if not self._closing.is_set():
                        said = words[rank].decode(errors="replace")
                        lost(said or f"rank {rank} is gone", None if said else rank)
                    for peer in self._peers.values():
                        selector.unregister(peer)
                        peer.close()
                    return


def watch_members(
    store: Store, address: str, rank: int, world_size: int, deadline: float, cancelled: threading.Event
) -> Watch:
    """This member's watch, once every rank has shown that it is there now.

    ``deadline`` is a time of ``time.monotonic``. Raises TimeoutError naming the ranks that did not connect to rank 0, ConnectionError when
    a member is lost, ConnectionAbortedError soon after ``cancelled`` is set.
    """
    peers: dict[int, socket.socket] = {}
    try:
        if rank == 0:
            _accept_all(peers, store, address, world_size, deadline, cancelled)
        else:
            host, port = json.loads(await_value(store, _KEY, deadline, cancelled))
            peers[0] = socket.create_connection((host, port), timeout=seconds_left(deadline))
            peers[0].sendall(rank.to_bytes(4, "little"))
            _await_go(peers[0], rank, deadline, cancelled)
    except OSError:
        for peer in peers.values():
            peer.close()
        raise
    return Watch(peers)


def _accept_all(
    peers: dict[int, socket.socket],
    store: Store,
    address: str,
    world_size: int,
    deadline: float,
    cancelled: threading.Event,
) -> None:
    with hold_listening_socket(address) as listening:
        publish(store, _KEY, json.dumps(listening.getsockname()[:2]).encode())
        listening.settimeout(_POLL_SECONDS)
        while len(peers) < world_size - 1:
            _raise_if_over(peers, world_size, deadline, cancelled)
            try:
                peer, _ = listening.accept()
            except TimeoutError:
                continue
            peer.settimeout(seconds_left(deadline))
            peers[int.from_bytes(_exactly(peer, 4), "little")] = peer
    for peer in peers.values():
        peer.sendall(_GO)


def _raise_if_over(
    peers: Mapping[int, socket.socket], world_size: int, deadline: float, cancelled: threading.Event
) -> None:
    if cancelled.is_set():
        raise ConnectionAbortedError("waiting for the members to show that they are there was cancelled")
    if time.monotonic() >= deadline:
        missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in peers)
        raise TimeoutError(f"rank {missing} did not connect to rank 0 in time")


def _await_go(peer: socket.socket, rank: int, deadline: float, cancelled: threading.Event) -> None:
    peer.settimeout(_POLL_SECONDS)
    while True:
        if cancelled.is_set():
            raise ConnectionAbortedError(f"rank {rank} waited for rank 0 and was cancelled")
        try:
            word = peer.recv(1)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"rank 0 did not see every member in time; rank {rank} waited") from None
            continue
        if word != _GO:
            raise ConnectionError(f"rank 0 is gone while rank {rank} waited for it")
        return


def _exactly(peer: socket.socket, nbytes: int) -> bytes:
    try:
        word = peer.recv(nbytes, socket.MSG_WAITALL)
    except OSError:
        peer.close()
        raise
    if len(word) != nbytes:
        peer.close()
        raise ConnectionError("a member connected to rank 0 and was gone before it said which rank it is")
    return word


def _read(peer: socket.socket) -> bytes:
    try:
        return peer.recv(1024)
    except OSError:
        return b""


__all__ = ["Watch", "watch_members"]
