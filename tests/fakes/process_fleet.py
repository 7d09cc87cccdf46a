"""Small engines, each in a process of its own, below the real sync job and client in this one; any engine may be killed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

import rolloutfleet
from fakes.served_fleet import SOON, TOKEN, FixedRoster, MemoryStatus
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.policy import RefitPolicy, Transport
from rolloutfleet_sync.protocol.members import is_admitted
from rolloutfleet_sync.protocol.model import Identity, Timing, initial_state
from rolloutfleet_sync.runtime import Runtime
from rolloutfleet_sync.server import build_app
from rolloutfleet_sync.workers import WorkerCaller

TESTS = Path(__file__).parents[1]


class ProcessFleet:
    """Engines that hold weights and generate nothing, with a sync job of this policy; ends with its ``with`` block."""

    def __init__(self, engines: int = 3, timing: Timing | None = None) -> None:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.policy = RefitPolicy(transport=Transport.GLOO)
        self._timing = timing or Timing()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "fakes.engine_process", str(number)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(engines)
        ]
        ports = [int(process.stdout.readline()) for process in self.processes if process.stdout is not None]
        self.names = [f"quickstart-{number}-0-0" for number in range(engines)]
        members = tuple(
            Member(engine=number, pod_name=name, pod_uid=f"uid-{number}", address=f"127.0.0.1:{port}", ranks=1)
            for number, (name, port) in enumerate(zip(self.names, ports, strict=True))
        )
        self._roster = Roster(fleet="quickstart", fleet_uid="fleet-uid", engines=engines, members=members)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self.port = self._run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self._run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def connect(self) -> rolloutfleet.Fleet:
        return rolloutfleet.connect(f"http://127.0.0.1:{self.port}", token=TOKEN, trainer="trainer")

    def kill(self, engine: int) -> None:
        """SIGKILL: nothing is said to anybody."""
        self.processes[engine].send_signal(signal.SIGKILL)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(4 * SOON)

    async def _start(self) -> int:
        identity = Identity(fleet="quickstart", namespace="default", fleet_uid="fleet-uid", model="tiny")
        state = initial_state(identity, self.policy, self._timing)
        self.runtime = Runtime(state, MemoryStatus(), FixedRoster(self._roster), WorkerCaller(TOKEN))
        self._stop = asyncio.Event()
        self._running = asyncio.ensure_future(self.runtime.run(self._stop))
        while True:
            records = self.runtime.state.members.values()
            if records and all(is_admitted(record, self.runtime.state.version) for record in records):
                break
            await self.runtime.wait_for_change(self.runtime.clock.now() + 1)
        self._runner = web.AppRunner(build_app(self.runtime, TOKEN), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _end(self) -> None:
        self._stop.set()
        await self._running
        await self._runner.cleanup()
