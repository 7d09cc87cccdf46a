"""The leader's side of an engine of several pods: who is there, and what they are told."""

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from pydantic import ValidationError

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Locality
from rolloutfleet_worker.channel import HEARTBEAT_SECONDS, SocketChannel
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.spreading import (
    HEADER_POD_RANK,
    HEADER_START,
    LINK_ROUTE,
    RANK_ROUTE,
    Hello,
    Start,
    common_locality,
    find_difference,
)
from rolloutfleet_worker.wire import LARGEST_FRAME, Frame

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS: Final = 3.0
"""How long a pod may take to say why its part of the engine has ended."""


@dataclass(frozen=True, slots=True)
class _Link:
    hello: Hello
    channel: SocketChannel


class Followers:
    """The engine's other pods; with one pod there are none, and all of them are there at once."""

    def __init__(
        self,
        mine: Hello,
        start: Start,
        ranks: Ranks,
        on_lost: Callable[[str], None],
        on_leaving: Callable[[str], None],
    ) -> None:
        """
        Args:
            mine: what the leader says of itself.
            start: the order that followers get once all are there.
            ranks: takes in the ranks of the other pods.
            on_lost: told why the engine cannot go on, once it has been started.
            on_leaving: told when a follower's pod is to end, with the reason.
        """
        self._mine = mine
        self._start = start
        self._ranks = ranks
        self._on_lost = on_lost
        self._on_leaving = on_leaving
        self._links: dict[int, _Link] = {}
        self._started = False
        self._ended = asyncio.Event()
        self._last_words = ""
        self.complete = asyncio.Event()
        """Set when every pod is there."""
        self._look()

    def routes(self) -> list[web.RouteDef]:
        """Those for launchers of followers; they carry the fleet's token as all control calls do."""
        return [web.get(LINK_ROUTE, self._serve_link), web.get(RANK_ROUTE, self._serve_rank)]

    @property
    def absent(self) -> str:
        """The pods that are awaited, in words; empty when all are there."""
        missing = [str(rank) for rank in range(1, self._mine.pods) if rank not in self._links]
        return f"the engine's pods of rank {', '.join(missing)} are not there yet" if missing else ""

    @property
    def locality(self) -> Locality:
        """What holds for every pod."""
        return common_locality([self._mine.locality, *(link.hello.locality for link in self._links.values())])

    async def start(self) -> None:
        """Order every pod to start vLLM; from now on a pod that is lost ends the engine."""
        self._started = True
        await self._tell(self._start.frame())

    async def tell_up(self) -> None:
        """Say that the engine serves, or will as soon as it is admitted."""
        await self._tell({"up": True})

    async def last_words(self) -> str:
        """Why a pod's part of the engine has ended, where one says so in time; empty otherwise."""
        if self._mine.pods > 1:
            await asyncio.wait({asyncio.ensure_future(self._ended.wait())}, timeout=LAST_WORDS_SECONDS)
        return self._last_words

    async def close(self) -> None:
        """End every link, and with them the followers' vLLMs."""
        self._started = False
        for link in list(self._links.values()):
            await link.channel.close()

    async def _tell(self, frame: Frame) -> None:
        for rank, link in sorted(self._links.items()):
            try:
                await link.channel.send(frame)
            except ConnectionError as error:
                log.warning("the pod of rank %d cannot be told: %s", rank, error)  # its link ends, which says all

    def _look(self) -> None:
        if self.absent:
            self.complete.clear()
        else:
            self.complete.set()

    async def _serve_link(self, request: web.Request) -> web.WebSocketResponse:
        socket = await _accept(request)
        channel = SocketChannel(socket)
        frame = await channel.receive()
        if frame is None:
            return socket
        try:
            hello = Hello.model_validate(frame)
        except ValidationError as error:
            await self._refuse(channel, f"what a follower says of itself cannot be understood: {error}", lasting=True)
            return socket
        if difference := find_difference(self._mine, hello):
            log.error("%s", difference)
            await self._refuse(channel, difference, lasting=True)
            return socket
        if self._started:
            # A pod that asks anew has lost its part of the engine, whether that was noticed here or not.
            self._lose(hello, "its launcher has started anew")
            await self._refuse(channel, "the engine runs, or is about to end", lasting=False)
            return socket
        await self._follow(channel, hello)
        return socket

    async def _follow(self, channel: SocketChannel, hello: Hello) -> None:
        former, link = self._links.get(hello.pod_rank), _Link(hello, channel)
        self._links[hello.pod_rank] = link
        if former is not None:
            await former.channel.close()
        log.info("pod %s is there as pod rank %d of engine %d", hello.pod_name, hello.pod_rank, hello.engine)
        self._look()
        reason = "its launcher is gone, or cannot be reached"
        while (frame := await channel.receive()) is not None:
            if "ended" in frame:
                reason = str(frame["ended"])
                break
            if "leaving" in frame:
                self._on_leaving(f"pod {hello.pod_name} of the engine: {frame['leaving']}")
        if self._links.get(hello.pod_rank) is link:
            if self._started:
                self._lose(hello, reason)
            else:
                del self._links[hello.pod_rank]
                self._look()

    def _lose(self, hello: Hello, reason: str) -> None:
        if not self._started:
            return
        self._last_words = self._last_words or f"pod {hello.pod_name} of the engine: {reason}"
        self._ended.set()
        self._on_lost(self._last_words)

    @staticmethod
    async def _refuse(channel: SocketChannel, reason: str, *, lasting: bool) -> None:
        await channel.send({"refused": reason, "lasting": lasting})
        await channel.close()

    async def _serve_rank(self, request: web.Request) -> web.WebSocketResponse:
        if not self._started or not hmac.compare_digest(request.headers.get(HEADER_START, ""), self._start.identity):
            raise ProblemError(
                ProblemCode.WRONG_POD, "this process is of an earlier start of the engine; it has to end"
            )
        socket = await _accept(request)
        await self._ranks.serve(SocketChannel(socket), int(request.headers[HEADER_POD_RANK]))
        return socket


async def _accept(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=LARGEST_FRAME)
    await socket.prepare(request)
    return socket
