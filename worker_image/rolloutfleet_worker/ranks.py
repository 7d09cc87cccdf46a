"""The launcher's end of its ranks: gathers their control threads, those of the engine's other pods too, and gives them orders."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rolloutfleet_worker.channel import Channel, StreamChannel
from rolloutfleet_worker.wire import Frame

log = logging.getLogger(__name__)

ABORT_SECONDS = 10.0
"""How long a rank may take to leave its group once told to."""


class RankFailedError(Exception):
    """An order failed on at least one rank.

    ``touched`` says whether any live weight may have changed, ``cut_off`` that every rank which failed is sound itself and was cut off
    by another party of its group.
    """

    def __init__(self, message: str, *, touched: bool, cut_off: bool = False) -> None:
        super().__init__(message)
        self.touched = touched
        self.cut_off = cut_off


class RankStuckError(Exception):
    """A rank did not answer although it was told to abort: its process has to be killed."""


class _Connection:
    def __init__(self, rank: int, hello: Frame, channel: Channel) -> None:
        self.rank = rank
        self.hello = hello
        self.channel = channel
        self.pending: dict[int, asyncio.Future[Frame]] = {}


class Ranks:
    """The connected ranks of one engine, by their number in it; each of its ``pods`` holds as many, consecutive ones."""

    def __init__(self, expected: int, on_lost: Callable[[str], None], pods: int = 1) -> None:
        """``on_lost`` is told why the engine cannot go on."""
        self._expected = expected
        self._per_pod = expected // pods
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
        for connection in list(self._connections.values()):
            await connection.channel.close()

    def described(self, key: str) -> tuple[str, ...]:
        """What each rank said of itself when it connected, by rank."""
        return tuple(str(connection.hello[key]) for _, connection in sorted(self._connections.items()))

    async def order_all(
        self, op: str, bodies: Mapping[int, Frame], deadline_seconds: float, *, unblock: str = "abort"
    ) -> dict[int, Frame]:
        """Give each rank its order, all at once; answers by rank.

        As soon as one rank fails, or the deadline passes, the others are told to abort (or what ``unblock`` names): they may be
        waiting in a collective for the one that has left it.

        Raises:
            RankFailedError: names every rank that failed and why.
            RankStuckError: a rank has not even obeyed the abort.
        """
        orders = {asyncio.ensure_future(self._order(rank, op, body)): rank for rank, body in bodies.items()}
        late = await self._first_failure(set(orders), deadline_seconds)
        if unfinished := {order for order in orders if not order.done()}:
            await self._tell_all(unblock)
            await asyncio.wait(unfinished, timeout=ABORT_SECONDS)
        stuck = sorted(rank for order, rank in orders.items() if not order.done())
        for order in orders:
            order.cancel()
        if stuck:
            raise RankStuckError(f"{op}: local rank {', '.join(map(str, stuck))} did not end even when told to abort")
        results = {rank: order.result() for order, rank in orders.items()}
        failed = {rank: answer for rank, answer in results.items() if not answer["ok"]}
        if failed:
            reasons = [f"{op} did not end within {deadline_seconds:g} s"] if late else []
            reasons += [str(answer["message"]) for _, answer in sorted(failed.items())]
            touched = len(failed) < len(results) or any(answer["touched"] for answer in failed.values())
            raise RankFailedError(
                "; ".join(reasons), touched=touched, cut_off=all(answer["cut_off"] for answer in failed.values())
            )
        return {rank: answer["body"] for rank, answer in results.items()}

    async def abort_all(self) -> None:
        """Tell every connected rank to leave its group and to end the order under way.

        Raises:
            RankStuckError: a rank's control thread itself does not answer.
        """
        await self._tell_all("abort")

    async def let_go_all(self) -> None:
        """Tell every connected rank to end its lending; a group that it is in stays.

        Raises:
            RankStuckError: a rank's control thread itself does not answer.
        """
        await self._tell_all("let-go")

    async def _tell_all(self, word: str) -> None:
        orders = [asyncio.ensure_future(self._order(rank, word, {})) for rank in sorted(self._connections)]
        if not orders:
            return
        _, unanswered = await asyncio.wait(orders, timeout=ABORT_SECONDS)
        for order in unanswered:
            order.cancel()
        if unanswered:
            raise RankStuckError(f"{len(unanswered)} of {len(orders)} ranks did not answer {word!r}")

    def every_rank(self, body: Frame) -> dict[int, Frame]:
        return dict.fromkeys(range(self._expected), body)

    @staticmethod
    async def _first_failure(orders: "set[asyncio.Future[Frame]]", deadline_seconds: float) -> bool:
        """Return when all have succeeded or one has failed; True when the deadline passed first."""
        pending = orders
        until = asyncio.get_running_loop().time() + deadline_seconds
        while pending:
            left = until - asyncio.get_running_loop().time()
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return True
            if any(not order.result()["ok"] for order in done):
                return False
        return False

    async def _order(self, rank: int, op: str, body: Frame) -> Frame:
        connection = self._connections.get(rank)
        if connection is None:
            return _gone(rank)
        order_id = next(self._ids)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        connection.pending[order_id] = answer
        try:
            await connection.channel.send({"id": order_id, "op": op, "body": body})
            return await answer
        except ConnectionError:
            return _gone(rank)
        finally:
            connection.pending.pop(order_id, None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.serve(StreamChannel(reader, writer))

    async def serve(self, channel: Channel, pod: int = 0) -> None:
        """Take in the rank at the other end, of this pod or of another one of the engine; returns when it is gone."""
        greeting = await channel.receive()
        if greeting is None or "hello" not in greeting:
            log.error("a process connected to the ranks' socket and did not say which rank it is")
            return await channel.close()
        hello = greeting["hello"]
        connection = _Connection(hello["rank"], hello, channel)
        if fault := self._misplaced(connection.rank, pod):
            self._on_lost(fault)
            return await channel.close()
        self._connections[connection.rank] = connection
        if len(self._connections) == self._expected:
            self.complete.set()
        while (frame := await channel.receive()) is not None:
            if (pending := connection.pending.get(frame["id"])) is not None and not pending.done():
                pending.set_result(frame)
        for pending in connection.pending.values():
            if not pending.done():
                pending.set_result(_gone(connection.rank))
        if self._connections.get(connection.rank) is connection:
            del self._connections[connection.rank]
            self.complete.clear()
            self._on_lost(f"the process of local rank {connection.rank} ended")
        return None

    def _misplaced(self, rank: int, pod: int) -> str:
        """Why a process cannot be this rank; empty when it can. Weights for one rank must never reach another."""
        if rank in self._connections:
            return f"two processes say that they are local rank {rank}"
        if rank // self._per_pod != pod:
            first, last = pod * self._per_pod, (pod + 1) * self._per_pod - 1
            return f"a process of pod rank {pod} says that it is local rank {rank}; that pod holds the ranks {first} to {last}"
        return ""


def _gone(rank: int) -> Frame:
    return {"ok": False, "message": f"the process of local rank {rank} has ended", "touched": True, "cut_off": False}
