"""Connections between rank 0 of a team and its other ranks: a message is JSON behind its length."""

import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rolloutfleet.errors import DeadlineExceeded, TeamLost
from rolloutfleet.team.messages import Message, decode, encode

MESSAGE_BYTES: Final = 256 << 20
"""Largest message that is taken, far above the largest manifest."""

SENDING_SECONDS: Final = 30.0
"""A rank that takes nothing for so long counts as lost."""

_LENGTH: Final = struct.Struct(">I")
_TIMEVAL: Final = struct.Struct("ll")
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Link:
    """One connection; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.peer = peer
        """The rank at the other end."""
        self._connection = connection
        self._sending = threading.Lock()
        self._received = bytearray()
        """Of the message that is under way."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # Python's own timeout would hold for both directions at once.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SENDING_SECONDS))

    def send(self, message: Message) -> None:
        """Sends a message; TeamLost when the other end is gone or takes nothing."""
        data = encode(message)
        try:
            with self._sending:
                self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise TeamLost(f"trainer rank {self.peer} is not reached any more: {error}") from error

    def receive(self, deadline: float | None = None) -> Message:
        """The next message; TeamLost when the other end is gone, DeadlineExceeded at ``deadline`` (of ``time.monotonic``)."""
        self._read(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MESSAGE_BYTES:
            raise TeamLost(f"trainer rank {self.peer} sent {length} bytes at once; at most {MESSAGE_BYTES} are taken")
        self._read(_LENGTH.size + length, deadline)
        message, self._received = bytes(self._received[_LENGTH.size :]), bytearray()
        try:
            return decode(message)
        except ValueError as error:
            raise TeamLost(
                f"trainer rank {self.peer} sent no message of this release; install one release of the client on all ranks ({error})"
            ) from error

    def close(self) -> None:
        """Ends the connection; a thread that receives from it sees TeamLost."""
        with suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size: int, deadline: float | None) -> None:
        """Returns once so many bytes of the message under way are here; those that are stay when the deadline passes."""
        while len(self._received) < size:
            left = 0.0 if deadline is None else max(deadline - time.monotonic(), 0.001)
            try:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
                part = self._connection.recv(min(size - len(self._received), 1 << 20))
            except BlockingIOError as error:
                raise DeadlineExceeded(f"no word from trainer rank {self.peer} in time") from error
            except OSError as error:
                raise TeamLost(f"the connection to trainer rank {self.peer} broke: {error}") from error
            if not part:
                raise TeamLost(f"trainer rank {self.peer} has ended or closed its fleet")
            self._received += part


class Leader:
    """Rank 0's end of the team; a process without a team leads nobody."""

    def __init__(self, links: Mapping[int, Link] | None = None) -> None:
        self._links = dict(links or {})
        self.inbox: queue.SimpleQueue[tuple[int, Message | TeamLost]] = queue.SimpleQueue()
        """What other ranks say, with their rank; TeamLost is a rank's last word."""
        for rank, link in self._links.items():
            threading.Thread(
                target=self._read, args=(rank, link), name=f"rolloutfleet-team-{rank}", daemon=True
            ).start()

    @property
    def rank(self) -> int:
        return 0

    @property
    def ranks(self) -> int:
        return len(self._links) + 1

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(sorted(self._links))

    def tell(self, message: Message, rank: int | None = None) -> None:
        """Sends to one rank, or to all others; a rank that is not reached says so in the inbox."""
        for other in self.others if rank is None else (rank,):
            try:
                self._links[other].send(message)
            except TeamLost as error:
                self.inbox.put((other, error))

    def close(self) -> None:
        """Ends the connections to all ranks."""
        for link in self._links.values():
            link.close()

    def _read(self, rank: int, link: Link) -> None:
        while True:
            try:
                self.inbox.put((rank, link.receive()))
            except TeamLost as error:
                self.inbox.put((rank, error))
                return


class Follower:
    """Another rank's end of the team."""

    def __init__(self, link: Link, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._link = link

    def tell(self, message: Message) -> None:
        """Sends to rank 0; TeamLost when it is gone."""
        self._link.send(message)

    def hear(self, deadline: float) -> Message:
        """Rank 0's next message; TeamLost, or DeadlineExceeded at ``deadline`` (of ``time.monotonic``)."""
        return self._link.receive(deadline)

    def close(self) -> None:
        """Ends the connection to rank 0."""
        self._link.close()


Team = Leader | Follower


def _timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
