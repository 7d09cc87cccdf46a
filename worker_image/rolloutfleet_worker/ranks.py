"""The launcher's end of the Unix socket: gathers the control threads of all ranks and gives them orders."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from rolloutfleet_worker.wire import Frame, encode, read_frame


class RankFailedError(Exception):
    """An order failed on at least one rank; ``touched`` says whether any live weight may have changed."""

    def __init__(self, message: str, *, touched: bool) -> None:
        super().__init__(message)
        self.touched = touched


class RankGoneError(RankFailedError):
    """A rank's process closed its connection."""


class _Connection:
    def __init__(self, rank: int, hello: Frame, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self.hello = hello
        self.writer = writer
        self.pending: dict[int, asyncio.Future[Frame]] = {}


class Ranks:
    """The connected ranks of this pod."""

    def __init__(self, expected: int, on_lost: Callable[[int], None]) -> None:
        self._expected = expected
        self._on_lost = on_lost
        self._connections: dict[int, _Connection] = {}
        self._ids = itertools.count(1)
        self._server: asyncio.Server | None = None
        self.complete = asyncio.Event()
        """Set when every expected rank has connected."""

    async def listen(self, path: Path) -> None:
        """Accept ranks on a Unix socket.

        Raises:
            OSError: the socket cannot be made.
        """
        self._server = await asyncio.start_unix_server(self._accept, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.writer.close()

    def described(self, key: str) -> tuple[str, ...]:
        """What each rank said of itself when it connected, by rank."""
        return tuple(str(connection.hello[key]) for _, connection in sorted(self._connections.items()))

    async def order_all(self, op: str, bodies: Mapping[int, Frame], deadline_seconds: float) -> dict[int, Frame]:
        """Give each rank its order, all at once; answers by rank.

        Raises:
            RankFailedError: a rank refused or failed; names it. The others have answered too by then.
            TimeoutError: a rank has not answered within the deadline.
        """
        if not self.complete.is_set():
            raise RankGoneError(f"{len(self._connections)} of {self._expected} ranks are connected", touched=False)
        async with asyncio.timeout(deadline_seconds):
            answers = await asyncio.gather(*(self._order(rank, op, body) for rank, body in bodies.items()))
        results = dict(zip(bodies, answers, strict=True))
        failed = {rank: answer for rank, answer in results.items() if not answer["ok"]}
        if failed:
            touched = any(answer.get("touched", True) for answer in failed.values()) or (
                op == "receive" and len(failed) < len(results)
            )
            kind = RankGoneError if any(answer.get("gone") for answer in failed.values()) else RankFailedError
            raise kind("; ".join(str(answer["message"]) for _, answer in sorted(failed.items())), touched=touched)
        return {rank: answer["body"] for rank, answer in results.items()}

    def every_rank(self, body: Frame) -> dict[int, Frame]:
        return dict.fromkeys(range(self._expected), body)

    async def _order(self, rank: int, op: str, body: Frame) -> Frame:
        connection = self._connections.get(rank)
        if connection is None:
            return _gone(rank)
        order_id = next(self._ids)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        connection.pending[order_id] = answer
        try:
            connection.writer.write(encode({"id": order_id, "op": op, "body": body}))
            await connection.writer.drain()
            return await answer
        except ConnectionError:
            return _gone(rank)
        finally:
            connection.pending.pop(order_id, None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await read_frame(reader)
        if greeting is None or "hello" not in greeting:
            writer.close()
            return
        hello = greeting["hello"]
        connection = _Connection(hello["rank"] % self._expected, hello, writer)
        self._connections[connection.rank] = connection
        if len(self._connections) == self._expected:
            self.complete.set()
        while (frame := await read_frame(reader)) is not None:
            if (pending := connection.pending.get(frame["id"])) is not None and not pending.done():
                pending.set_result(frame)
        for pending in connection.pending.values():
            if not pending.done():
                pending.set_result(_gone(connection.rank))
        if self._connections.get(connection.rank) is connection:
            del self._connections[connection.rank]
            self.complete.clear()
            self._on_lost(connection.rank)


def _gone(rank: int) -> Frame:
    return {"ok": False, "message": f"the process of local rank {rank} has ended", "touched": True, "gone": True}
