"""The main process of a follower's pod: holds the link to the leader's launcher, runs vLLM without its API server, hands on its ranks."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web

from rolloutfleet.contract.environment import communication_environment
from rolloutfleet.locality import locality
from rolloutfleet_worker.channel import HEARTBEAT_SECONDS, Channel, SocketChannel, StreamChannel
from rolloutfleet_worker.engine_process import EngineProcess
from rolloutfleet_worker.interface import own_interface
from rolloutfleet_worker.plugin import ENV_RANK_SOCKET
from rolloutfleet_worker.settings import Settings
from rolloutfleet_worker.spreading import (
    HEADER_POD_RANK,
    HEADER_START,
    HOST_ADDRESS,
    LINK_ROUTE,
    RANK_ROUTE,
    Hello,
    Start,
    digest_of,
)
from rolloutfleet_worker.wire import LARGEST_FRAME, Frame

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
CONNECT_SECONDS = 5.0
STOP_GRACE_SECONDS = 10.0


class RefusedError(Exception):
    """The leader will not have this pod; its words."""


class Follower:
    """Runs one pod's part of an engine from start to end."""

    def __init__(
        self, settings: Settings, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._environment = environment
        self._stop = asyncio.Event()
        self._waits_for = f"the leader at {settings.leader} is not there yet"
        """Why vLLM does not run here yet, or the engine is not up; empty when it is."""

    async def run(self) -> int:
        """The exit code: 0 after a requested stop, 1 when this pod's part of the engine, or all of it, has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        runner = web.AppRunner(self._probes(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._settings.address, self._settings.control_port, reuse_address=True).start()
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            headers = {"Authorization": f"Bearer {self._settings.token}"}
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                return await self._follow(session)
        except RefusedError as refused:
            return self._fail(str(refused))
        finally:
            await runner.cleanup()

    async def _follow(self, session: aiohttp.ClientSession) -> int:
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        linking = asyncio.create_task(self._link(session), name="link")
        try:
            await asyncio.wait({stopping, linking}, return_when=asyncio.FIRST_COMPLETED)
            if not linking.done():
                return 0
            link, start = linking.result()
            with TemporaryDirectory(prefix="rolloutfleet-") as folder:
                return await self._run_engine(session, link, start, Path(folder) / "ranks.sock", stopping)
        finally:
            for task in (stopping, linking):
                task.cancel()

    async def _link(self, session: aiohttp.ClientSession) -> tuple[Channel, Start]:
        """The leader's order, as soon as all pods are there.

        Raises:
            RefusedError: this pod is none of the leader's engine.
        """
        while True:
            # A leader that is not there yet, or about to end, is awaited: the kubelet bounds a start.
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                channel = SocketChannel(await self._connect(session, LINK_ROUTE, {}))
                await channel.send(self._hello().model_dump(mode="json"))
                self._waits_for = "not all pods of the engine are there yet"
                answer = await channel.receive()
                if answer is not None and "start" in answer:
                    return channel, Start.parse(answer)
                if answer is not None and answer["lasting"]:
                    raise RefusedError(str(answer["refused"]))
                self._waits_for = str(answer["refused"]) if answer is not None else "the leader has gone away"
                await channel.close()
            await asyncio.sleep(RETRY_SECONDS)

    async def _run_engine(
        self,
        session: aiohttp.ClientSession,
        link: Channel,
        start: Start,
        path: Path,
        stopping: "asyncio.Task[bool]",
    ) -> int:
        settings = self._settings
        self._waits_for = "vLLM is starting"

        async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._hand_on(session, start, StreamChannel(reader, writer))

        server = await asyncio.start_unix_server(hand_on, path)
        environment = {
            ENV_RANK_SOCKET: str(path),
            HOST_ADDRESS: settings.address,
            **own_interface(settings.address, self._environment),
        }
        arguments = [*self._arguments, *start.arguments(settings.pods, settings.pod_rank)]
        process = await EngineProcess.start(arguments, environment)
        exited = asyncio.create_task(process.exited(), name="engine-exit")
        lost = asyncio.create_task(self._listen(link), name="leader")
        try:
            await asyncio.wait({exited, lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not exited.done() and not lost.done():
                await self._leave(link, {exited, lost})
                return 0
            if exited.done():
                reason = f"vLLM ended with exit code {exited.result()}: {process.last_words()}"
                with suppress(ConnectionError):
                    await link.send({"ended": reason})
                return self._fail(reason)
            process.kill()
            return self._fail(f"the leader at {settings.leader} has ended, and the engine with it")
        finally:
            lost.cancel()
            await process.stop(STOP_GRACE_SECONDS)
            server.close()
            await link.close()

    async def _leave(self, link: Channel, ends: "set[asyncio.Task[int] | asyncio.Task[None]]") -> None:
        """The leader answers what is in flight, and then ends the engine."""
        with suppress(ConnectionError):
            await link.send({"leaving": "it has been told to end"})
        seconds = max(self._settings.grace_seconds - STOP_GRACE_SECONDS, STOP_GRACE_SECONDS)
        _, left = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if len(left) == len(ends):
            log.warning("the leader has not ended the engine within %.0f s", seconds)

    async def _listen(self, link: Channel) -> None:
        """Returns when the leader is gone."""
        while (frame := await link.receive()) is not None:
            if "up" in frame:
                self._waits_for = ""
                log.info("engine %d is up", self._settings.engine)

    async def _hand_on(self, session: aiohttp.ClientSession, start: Start, rank: Channel) -> None:
        """A rank's frames to the leader and back; its process ends when the leader is gone."""
        headers = {HEADER_START: start.identity, HEADER_POD_RANK: str(self._settings.pod_rank)}
        try:
            leader = SocketChannel(await self._connect(session, RANK_ROUTE, headers))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("the leader does not take in a rank: %s", error)
            return await rank.close()
        ways = {asyncio.create_task(_pass(rank, leader)), asyncio.create_task(_pass(leader, rank))}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await leader.close()
        return await rank.close()

    async def _connect(
        self, session: aiohttp.ClientSession, route: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientWebSocketResponse:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await session.ws_connect(
                f"http://{self._settings.leader}{route}",
                headers=headers,
                heartbeat=HEARTBEAT_SECONDS,
                max_msg_size=LARGEST_FRAME,
            )

    def _hello(self) -> Hello:
        return hello_of(self._settings, self._arguments, self._environment)

    def _fail(self, reason: str) -> int:
        log.error("%s", reason)
        if self._settings.termination_log is not None:
            self._settings.termination_log.write_text(reason[:4000])
        return 1

    def _probes(self) -> web.Application:
        """Live as long as this process answers: links that break end it. Started and Ready with the engine as a whole."""

        def answer(reason: Callable[[], str]) -> Callable[[web.Request], "asyncio.Future[web.Response]"]:
            async def handle(_: web.Request) -> web.Response:
                why = reason()
                text = json.dumps({"ok": not why, "reason": why})
                return web.Response(status=503 if why else 200, text=text, content_type="application/json")

            return handle  # type: ignore[return-value]

        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz/live", answer(lambda: "")),
                web.get("/healthz/ready", answer(lambda: self._waits_for)),
                web.get("/healthz/started", answer(lambda: self._waits_for)),
            ]
        )
        return application


def hello_of(settings: Settings, arguments: Sequence[str], environment: Mapping[str, str]) -> Hello:
    """What this pod says of itself to the engine's others."""
    return Hello(
        fleet_uid=settings.identity.fleet_uid,
        engine=settings.engine,
        pod_name=settings.identity.pod_name,
        pod_rank=settings.pod_rank,
        pods=settings.pods,
        ranks=settings.ranks,
        arguments=digest_of(arguments),
        environment=communication_environment(environment),
        locality=locality(),
    )


async def _pass(source: Channel, target: Channel) -> None:
    frame: Frame | None
    with suppress(ConnectionError):
        while (frame := await source.receive()) is not None:
            await target.send(frame)
