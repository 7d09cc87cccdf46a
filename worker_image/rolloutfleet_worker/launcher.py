"""The pod's main process: starts vLLM, watches it, and answers the sync job for it."""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web

from rolloutfleet.contract.environment import communication_environment
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.locality import locality
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS, private_folder
from rolloutfleet_worker.control import make_application
from rolloutfleet_worker.draining import drain
from rolloutfleet_worker.engine_client import EngineClient
from rolloutfleet_worker.engine_process import EngineProcess
from rolloutfleet_worker.fence import Fence
from rolloutfleet_worker.follower import hello_of
from rolloutfleet_worker.followers import Followers
from rolloutfleet_worker.interface import own_interface
from rolloutfleet_worker.middleware import ENV_ENGINE_NAME, ENV_ENGINE_SECRET
from rolloutfleet_worker.plugin import ENV_RANK_SOCKET
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.settings import Settings
from rolloutfleet_worker.spreading import HOST_ADDRESS, Start

log = logging.getLogger(__name__)

HEALTH_PERIOD_SECONDS = 2.0
HEALTH_DEADLINE_SECONDS = 20.0
UNANSWERED_SECONDS = 60.0
"""Without an answer from the engine's loop for this long, outside a transfer, the engine counts as dead."""
STOP_GRACE_SECONDS = 10.0


class Launcher:
    """Runs one engine from start to end."""

    def __init__(
        self, settings: Settings, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._environment = environment
        self._secret = secrets.token_urlsafe(32)
        self._last_answer = time.monotonic()
        self._dead = ""
        self._came_up = False
        self._stop = asyncio.Event()
        self._process: EngineProcess | None = None

    async def run(self) -> int:
        """The exit code: 0 after a requested stop, 1 when vLLM ended by itself."""
        # A folder of our own, so that nobody else can offer a socket in our place.
        with (
            TemporaryDirectory(prefix="rolloutfleet-") as folder,
            private_folder() as adapters,
        ):
            return await self._run(Path(folder) / "ranks.sock", adapters)

    async def _run(self, socket_path: Path, adapters: Path) -> int:
        settings = self._settings
        ranks = Ranks(settings.ranks, self._declare_dead, settings.pods)
        await ranks.listen(socket_path)
        self._catch_signals()
        followers = self._followers = self._make_followers(ranks)
        async with aiohttp.ClientSession() as session:
            engine = EngineClient(session, settings.generation_port, self._secret)
            fence = Fence(identity=settings.identity, await_first_refit=settings.await_first_refit)
            self._pod = EnginePod(
                fence,
                settings.engine,
                ranks,
                settings.ranks,
                engine,
                self._kill,
                communication_environment(self._environment),
                locality(),
            )
            application = make_application(self._pod, settings.token, self._why_dead, followers.routes())
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, settings.address, settings.control_port, reuse_address=True).start()
            stopping = asyncio.create_task(self._stop.wait(), name="stop")
            try:
                if not await self._gather(stopping):
                    return 0
                arguments, environment = self._child(socket_path, adapters)
                process = self._process = await EngineProcess.start(arguments, environment)
                return await self._serve(process, engine, ranks, stopping)
            finally:
                stopping.cancel()
                await followers.close()
                await ranks.close()
                await runner.cleanup()

    async def _gather(self, stopping: "asyncio.Task[bool]") -> bool:
        """Start the engine's other pods once all are there; False when it is to end before that."""
        followers = self._followers
        if followers.absent:
            log.info("%s", followers.absent)
        complete = asyncio.create_task(followers.complete.wait(), name="followers")
        await asyncio.wait({complete, stopping}, return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        if stopping.done():
            return False
        self._pod.locality = followers.locality
        await followers.start()
        return True

    async def _serve(
        self, process: EngineProcess, engine: EngineClient, ranks: Ranks, stopping: "asyncio.Task[bool]"
    ) -> int:
        watching = asyncio.create_task(self._watch_engine(engine, ranks), name="engine-health")
        exited = asyncio.create_task(process.exited(), name="engine-exit")
        try:
            await asyncio.wait({exited, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done() and not self._dead:
                await drain(self._pod, engine, exited, self._settings.grace_seconds - STOP_GRACE_SECONDS)
            return await self._end(process, exited)
        finally:
            watching.cancel()
            await process.stop(STOP_GRACE_SECONDS)

    async def _end(self, process: EngineProcess, exited: "asyncio.Task[int]") -> int:
        if not exited.done() and not self._dead:
            log.info("asked to stop; vLLM gets %g s", STOP_GRACE_SECONDS)
            return 0
        elsewhere = await self._followers.last_words() if self._dead else ""
        if not exited.done():
            process.kill()
        code = await exited
        ended = self._dead or f"vLLM ended with exit code {code}"
        # Errors from before the engine's last answer it has survived: a failed refit leaves some in its output, too.
        words = (
            process.error_since(self._last_answer - HEALTH_PERIOD_SECONDS) if self._came_up else process.last_words()
        )
        words = words or "without an error in its output; it may have been killed, for instance for its memory"
        reason = elsewhere or f"{ended}: {words}"
        self._pod.failed(reason)
        log.error("%s", reason)
        if self._settings.termination_log is not None:
            self._settings.termination_log.write_text(reason[:4000])
        return 1

    async def _watch_engine(self, engine: EngineClient, ranks: Ranks) -> None:
        await ranks.complete.wait()
        while True:
            try:
                paused = await engine.is_paused(HEALTH_DEADLINE_SECONDS)
                self._last_answer = time.monotonic()
                if self._pod.fence.state is WorkerState.STARTING:
                    await self._pod.started()
                    self._came_up = True
                    await self._followers.tell_up()
                    log.info("engine %d is up", self._settings.engine)
                await self._pod.reconcile_pause(paused=paused)
            except ProblemError as problem:
                log.debug("the engine does not answer: %s", problem)
            await asyncio.sleep(HEALTH_PERIOD_SECONDS if self._pod.fence.state is not WorkerState.STARTING else 0.25)

    def _why_dead(self) -> str:
        """Never dead while starting or receiving: both may keep the engine's loop busy for long."""
        if self._dead or self._pod.fence.state in {WorkerState.STARTING, WorkerState.RECEIVING}:
            return self._dead
        silent = time.monotonic() - self._last_answer
        return f"the engine's loop has not answered for {silent:.0f} s" if silent > UNANSWERED_SECONDS else ""

    def _declare_dead(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._pod.failed(reason)
        self._stop.set()

    def _leave(self, reason: str) -> None:
        log.info("the engine is to end: %s", reason)
        self._stop.set()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _make_followers(self, ranks: Ranks) -> Followers:
        settings = self._settings
        self._start = Start(identity=secrets.token_urlsafe(32), address=settings.address, port=settings.engine_port)
        mine = hello_of(settings, self._arguments, self._environment)
        return Followers(mine, self._start, ranks, self._declare_dead, self._leave)

    def _child(self, socket_path: Path, adapters: Path) -> tuple[list[str], dict[str, str]]:
        """vLLM's arguments, and what it gets beside this process's own environment."""
        settings = self._settings
        arguments = [*self._arguments, f"--port={settings.generation_port}"]
        environment = {
            ENV_ADAPTERS: str(adapters),
            ENV_RANK_SOCKET: str(socket_path),
            ENV_ENGINE_SECRET: self._secret,
            ENV_ENGINE_NAME: settings.identity.pod_name,
            **own_interface(settings.address, self._environment),
        }
        if settings.pods > 1:
            arguments += self._start.arguments(settings.pods, settings.pod_rank)
            environment[HOST_ADDRESS] = settings.address
        return arguments, environment
