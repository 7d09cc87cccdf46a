"""The pod's main process: starts vLLM, watches it, and answers the sync job for it."""

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web

from rolloutfleet.contract.environment import communication_environment
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.locality import locality
from rolloutfleet.routing import interface_of
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS, private_folder
from rolloutfleet_worker.control import make_application
from rolloutfleet_worker.draining import drain
from rolloutfleet_worker.engine_client import EngineClient
from rolloutfleet_worker.engine_process import EngineProcess
from rolloutfleet_worker.fence import Fence
from rolloutfleet_worker.middleware import ENV_ENGINE_NAME, ENV_ENGINE_SECRET
from rolloutfleet_worker.plugin import ENV_RANK_SOCKET
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.settings import Settings

log = logging.getLogger(__name__)

HEALTH_PERIOD_SECONDS = 2.0
HEALTH_DEADLINE_SECONDS = 20.0
UNANSWERED_SECONDS = 60.0
"""Without an answer from the engine's loop for this long, outside a transfer, the engine counts as dead."""
STOP_GRACE_SECONDS = 10.0
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class Launcher:
    """Runs one engine from start to end."""

    def __init__(
        self, settings: Settings, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._arguments = [*arguments, f"--port={settings.generation_port}"]
        self._environment = environment
        self._secret = secrets.token_urlsafe(32)
        self._last_answer = time.monotonic()
        self._dead = ""
        self._came_up = False
        self._stop = asyncio.Event()

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
        ranks = Ranks(settings.ranks, lambda rank: self._declare_dead(f"the process of local rank {rank} ended"))
        await ranks.listen(socket_path)
        self._catch_signals()
        process = await EngineProcess.start(
            self._arguments,
            {
                **self._child_environment(socket_path, adapters),
                **own_interface(settings.address, self._environment),
            },
        )
        async with aiohttp.ClientSession() as session:
            engine = EngineClient(session, settings.generation_port, self._secret)
            fence = Fence(identity=settings.identity, await_first_refit=settings.await_first_refit)
            self._pod = EnginePod(
                fence,
                settings.engine,
                ranks,
                settings.ranks,
                engine,
                process.kill,
                communication_environment(self._environment),
                locality(),
            )
            runner = web.AppRunner(make_application(self._pod, settings.token, self._why_dead), access_log=None)
            await runner.setup()
            await web.TCPSite(runner, settings.address, settings.control_port, reuse_address=True).start()
            watching = asyncio.create_task(self._watch_engine(engine, ranks), name="engine-health")
            exited = asyncio.create_task(process.exited(), name="engine-exit")
            stopping = asyncio.create_task(self._stop.wait(), name="stop")
            try:
                await asyncio.wait({exited, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not exited.done() and not self._dead:
                    await drain(self._pod, engine, exited, self._settings.grace_seconds - STOP_GRACE_SECONDS)
                return await self._end(process, exited)
            finally:
                watching.cancel()
                stopping.cancel()
                await process.stop(STOP_GRACE_SECONDS)
                await runner.cleanup()
                await ranks.close()

    async def _end(self, process: EngineProcess, exited: "asyncio.Task[int]") -> int:
        if not exited.done() and not self._dead:
            log.info("asked to stop; vLLM gets %g s", STOP_GRACE_SECONDS)
            return 0
        if not exited.done():
            process.kill()
        code = await exited
        ended = self._dead or f"vLLM ended with exit code {code}"
        # Errors from before the engine's last answer it has survived: a failed refit leaves some in its output, too.
        words = (
            process.error_since(self._last_answer - HEALTH_PERIOD_SECONDS) if self._came_up else process.last_words()
        )
        reason = f"{ended}: {words or 'without an error in its output; it may have been killed, for instance for its memory'}"
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
        self._dead = reason
        self._pod.failed(reason)
        self._stop.set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _child_environment(self, socket_path: Path, adapters: Path) -> dict[str, str]:
        return {
            ENV_ADAPTERS: str(adapters),
            ENV_RANK_SOCKET: str(socket_path),
            ENV_ENGINE_SECRET: self._secret,
            ENV_ENGINE_NAME: self._settings.identity.pod_name,
        }


def own_interface(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Has NCCL listen where the pod's own address is: left to itself it takes the first interface that it finds, which may be a bridge.

    Nothing for an address that is not an interface's (IPv6, loopback), or where the pod's environment names one.
    """
    if NCCL_INTERFACE in environment or ip_address(address).is_loopback:
        return {}
    name = interface_of(address)
    return {NCCL_INTERFACE: f"={name}"} if name else {}
