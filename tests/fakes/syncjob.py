"""The real sync job in the test's own event loop, over a roster and a status in memory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from fakes.clock import SkippingClock
from fakes.engine import FakeEngine
from fakes.worker import FakeWorker, Wire
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.policy import (
    OnFailure,
    PauseMode,
    RefitDeadlines,
    RefitPolicy,
    RollingPolicy,
    Staging,
    Strategy,
    Transport,
)
from rolloutfleet_sync.protocol.model import Identity, Timing, initial_state
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.summary import Readiness
from rolloutfleet_sync.runtime import Runtime
from rolloutfleet_sync.server import build_app
from rolloutfleet_sync.store import StoreError, parse_record, render_document
from rolloutfleet_sync.workers import WorkerCaller


class MemoryStatus:
    """A status store that outlives the sync job, and fails to order."""

    def __init__(self):
        self.document: dict[str, Any] = {}
        self.documents: list[dict[str, Any]] = []
        self.down = False
        self.lose_commit_answers = 0
        self.gate: asyncio.Event | None = None
        """When set, a write with a higher version waits for it."""
        self.committing = asyncio.Event()

    async def read(self) -> Record:
        if self.down:
            raise StoreError("the API server does not answer")
        return parse_record(self.document, "memory")

    async def write(self, status: Mapping[str, Any], readiness: Readiness, seconds: float) -> None:
        document = render_document(status, readiness, self.document, 1, "2030-01-01T00:00:00Z")
        commits = document["version"] > self.document.get("version", 0)
        if commits:
            self.committing.set()
            if self.gate is not None:
                await self.gate.wait()
        if self.down:
            raise StoreError("the API server does not answer")
        if document != self.document:
            self.document = document
            self.documents.append(document)
        if commits and self.lose_commit_answers:
            self.lose_commit_answers -= 1
            raise StoreError("the answer was lost")


class MemoryRoster:
    """A roster that tests change."""

    def __init__(self, roster: Roster):
        self.roster = roster
        self._changed = asyncio.Event()

    def change(self, roster: Roster) -> None:
        self.roster = roster
        self._changed.set()

    async def watch(self) -> AsyncIterator[Roster]:
        while True:
            self._changed.clear()
            yield self.roster
            await self._changed.wait()


@dataclass
class Fleet:
    """Fake workers, one real sync job and its store."""

    transport: Transport = Transport.GLOO
    deadlines: RefitDeadlines = field(default_factory=RefitDeadlines)
    token: str = "secret"
    engines: int = 2
    staging: Staging = Staging.AUTO
    pause: PauseMode = PauseMode.KEEP
    min_ready: int = 1
    on_failure: OnFailure = OnFailure.SERVE_OLD
    rolling: RollingPolicy | None = None
    """Where given, refits roll."""

    def __post_init__(self):
        self.clock = SkippingClock()
        self.wire = Wire()
        self.store = MemoryStatus()
        self.workers: list[FakeWorker] = []
        self.policy = RefitPolicy(
            transport=self.transport,
            staging=self.staging,
            pause=self.pause,
            min_ready=self.min_ready,
            on_failure=self.on_failure,
            deadlines=self.deadlines,
        )
        if self.rolling is not None:
            self.policy = self.policy.model_copy(update={"strategy": Strategy.ROLLING, "rolling": self.rolling})
        self.timing = Timing(poll=0.05, heartbeat=0.2, retry=0.02, unreachable=1.0, aborting=2.0, borrowing_retry=0.1)
        self.url = ""

    def new_worker(self, engine: int, incarnation: int = 0, ranks: int = 1) -> FakeWorker:
        name = f"f-{engine}-0-{incarnation}"
        member = Member(engine=engine, pod_name=name, pod_uid=f"uid-{name}", address="", ranks=ranks)
        return FakeWorker(FakeEngine(member, instance=f"i-{name}"), self.wire, self.token)

    def make_roster(self) -> Roster:
        members = tuple(worker.member for worker in sorted(self.workers, key=lambda w: w.member.engine))
        return Roster(fleet="f", fleet_uid="fleet-uid", engines=self.engines, members=members)

    async def start(self, ranks: int = 1) -> "Fleet":
        for engine in range(self.engines):
            self.workers.append(await self.new_worker(engine, ranks=ranks).start())
        self.rosters = MemoryRoster(self.make_roster())
        await self.start_sync()
        return self

    async def start_sync(self) -> None:
        state = initial_state(Identity("f", "ns", "fleet-uid", "model"), self.policy, self.timing)
        caller = WorkerCaller(self.token)
        self.runtime = Runtime(state, self.store, self.rosters, caller, clock=self.clock)
        self._runner = web.AppRunner(build_app(self.runtime, self.token), access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._stop = asyncio.Event()
        self._running = asyncio.ensure_future(self.runtime.run(self._stop))

    async def kill_sync(self) -> None:
        """End the sync job as SIGKILL does: nothing is told to anybody."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._runner.cleanup()

    async def stop_sync(self) -> None:
        """End the sync job as SIGTERM does."""
        self._stop.set()
        await self._running
        await self._runner.cleanup()

    async def until(self, condition: Any) -> None:
        """Return once the state of the sync job satisfies the condition."""
        async with asyncio.timeout(8):
            while not condition(self.runtime.state):
                await self.runtime.wait_for_change(self.clock.now() + 5)

    async def until_admitted(self) -> None:
        await self.until(lambda _: all(worker.engine.serves for worker in self.workers))

    async def close(self) -> None:
        await self.kill_sync()
        for worker in self.workers:
            await worker.kill()


logging.getLogger("rolloutfleet_sync").setLevel(logging.CRITICAL)
