"""A fleet over real sockets: the real sync job and two small engines, in an event loop of their own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web
from pydantic import BaseModel

import rolloutfleet
from fakes.wires import GlooWire, MemoryWire
from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.policy import RefitDeadlines, RefitPolicy, Transport
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import (
    CacheReport,
    CheckReport,
    CommitReport,
    JoinReport,
    ReceiveReport,
    WakeTag,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_sync.protocol.model import Identity, Timing, initial_state
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.runtime import Runtime
from rolloutfleet_sync.server import build_app
from rolloutfleet_sync.workers import WorkerCaller

TOKEN = "s3cret"
SOON = 8.0
"""Far below every deadline of the policy: what ends within it did not wait for one."""


class SmallEngine:
    """A launcher whose engine holds a version number and the digest of what it received."""

    def __init__(self, engine: int, wire: MemoryWire | GlooWire) -> None:
        self.pod = f"quickstart-{engine}-0-0"
        self.engine = engine
        self.wire = wire
        self.version = self.epoch = 0
        self.version_in_flight = 0
        self.admitted: int | None = None
        self.state = WorkerState.SERVING
        self.digest = "initial"
        self.calls: list[str] = []
        self.faults = ManifestFaults()
        self.cache_reset = True
        self.sleep_level = 0
        self.asleep: tuple[WakeTag, ...] = ()
        self.refuse: dict[str, str] = {}
        """Verb to words: answered with EngineFailed, before anything is done."""
        self.hold: set[str] = set()
        """Verbs that are answered only after an abort."""
        self._manifests: dict[str, Manifest] = {}
        self._aborted = asyncio.Event()
        self._group: Any = None
        self._rank = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get(f"{API_PREFIX}/worker", self._report)
        app.router.add_post(f"{API_PREFIX}/worker/{{verb}}", self._call)
        return app

    async def _report(self, request: web.Request) -> web.Response:
        return answer(self.report())

    async def _call(self, request: web.Request) -> web.Response:
        verb, body = request.match_info["verb"], await request.json()
        self.calls.append(verb)
        self.epoch = max(self.epoch, body["epoch"])
        if verb in self.refuse:
            return refusal(ProblemCode.ENGINE_FAILED, self.refuse[verb])
        if verb in self.hold:
            await self._aborted.wait()
        try:
            return answer(await getattr(self, f"_{verb.replace('-', '_')}")(body))
        except OSError as error:
            return refusal(ProblemCode.PEER_LOST, f"{self.pod}: {type(error).__name__}: {error}")

    async def _admit(self, body: dict) -> WorkerReport:
        self.admitted = body["version"]
        return self.report()

    async def _check(self, body: dict) -> CheckReport:
        manifest = Manifest.model_validate(body["manifest"])
        self._manifests[manifest.digest()] = manifest
        return CheckReport(faults=self.faults)

    async def _join(self, body: dict) -> JoinReport:
        self._aborted.clear()
        self._rank = body["rankOffset"]
        place = body["rendezvous"]["host"], body["rendezvous"]["port"], body["epoch"], self._rank, body["worldSize"]
        self._group = await asyncio.to_thread(self.wire.join, *place, body["deadlineSeconds"])
        return JoinReport(ranks=(self._rank,))

    async def _pause(self, body: dict) -> WorkerReport:
        self.state = WorkerState.PAUSED
        return self.report()

    async def _receive(self, body: dict) -> ReceiveReport:
        self.state, self.version_in_flight = WorkerState.RECEIVING, body["version"]
        manifest = self._manifests[body["manifestDigest"]]
        digest = await asyncio.to_thread(self.wire.receive, self._group, self._rank, manifest)
        self.digest, self.state = digest.hexdigest(), WorkerState.RECEIVED
        return ReceiveReport(
            version=body["version"],
            tensors=digest.tensors,
            nbytes=digest.nbytes,
            received_digests=(self.digest,),
            live_digests=(self.digest,),
            receive_seconds=0.0,
            load_seconds=0.0,
        )

    async def _commit(self, body: dict) -> CommitReport:
        self.version = self.admitted = body["version"]
        self.state, self.version_in_flight = WorkerState.PAUSED, 0
        return CommitReport(version=self.version, cache_reset=True)

    async def _resume(self, body: dict) -> WorkerReport:
        self.state = WorkerState.SERVING
        return self.report()

    async def _abort(self, body: dict) -> WorkerReport:
        self._aborted.set()
        if self._group is not None:
            self._group.abort(body["reason"])
            self._group = None
        dirty = self.state in {WorkerState.RECEIVING, WorkerState.RECEIVED, WorkerState.DIRTY}
        self.state = WorkerState.DIRTY if dirty else WorkerState.SERVING
        return self.report()

    async def _sleep(self, body: dict) -> WorkerReport:
        self.state, self.sleep_level = WorkerState.ASLEEP, body["level"]
        self.asleep = tuple(WakeTag)
        return self.report()

    async def _wake(self, body: dict) -> WorkerReport:
        self.asleep = tuple(tag for tag in self.asleep if body["tags"] and tag not in body["tags"])
        if not self.asleep:
            self.state, self.sleep_level = WorkerState.SERVING, 0
        return self.report()

    async def _reset_cache(self, body: dict) -> CacheReport:
        return CacheReport(cache_reset=self.cache_reset)

    def report(self) -> WorkerReport:
        return WorkerReport(
            fleet_uid="fleet-uid",
            pod_name=self.pod,
            pod_uid=f"uid-{self.engine}",
            instance="first",
            engine=self.engine,
            ranks=1,
            state=self.state,
            epoch=self.epoch,
            version=self.version,
            version_in_flight=self.version_in_flight,
            admitted=self.admitted,
            sleep_level=self.sleep_level,
            asleep=self.asleep,
            devices=("cpu",),
        )


def refusal(code: ProblemCode, message: str) -> web.Response:
    problem = Problem(code=code, message=message)
    return web.Response(text=problem.model_dump_json(), status=500, content_type="application/json")


def answer(message: BaseModel) -> web.Response:
    return web.Response(text=message.model_dump_json(by_alias=True), content_type="application/json")


class MemoryStatus:
    """A WeightSync's status in memory; outlives the sync jobs that write it."""

    def __init__(self) -> None:
        self.status: Mapping[str, Any] = {}

    async def read(self) -> Record:
        return Record.model_validate(self.status)

    async def write(self, status: Mapping[str, Any], readiness: object, seconds: float) -> None:
        self.status = dict(status)


class FixedRoster:
    """One roster, for ever."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def watch(self) -> AsyncIterator[Roster]:
        yield self._roster
        await asyncio.Event().wait()


class ServedFleet:
    """Two engines and a sync job in an event loop of their own."""

    def __init__(self, wire: MemoryWire | GlooWire, engine: type[SmallEngine] = SmallEngine) -> None:
        self.wire = wire
        self._kind = engine
        # Both engines or none: whatever is lost ends the refit.
        self.policy = RefitPolicy(transport=Transport.GLOO, min_ready=2, deadlines=RefitDeadlines(forming_seconds=60))
        self.timing = Timing(poll=0.02, heartbeat=0.1, retry=0.05, lease=30.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engines = [self.run(self._engine(number)) for number in range(2)]
        self._status = MemoryStatus()
        self._runners: list[web.AppRunner] = []
        ports = [self.serve(engine.app()) for engine in self.engines]
        members = tuple(
            Member(
                engine=engine.engine,
                pod_name=engine.pod,
                pod_uid=f"uid-{engine.engine}",
                address=f"127.0.0.1:{port}",
                ranks=1,
            )
            for engine, port in zip(self.engines, ports, strict=True)
        )
        self._roster = Roster(fleet="quickstart", fleet_uid="fleet-uid", engines=2, members=members)
        self.port = 0
        self.runtime: Runtime | None = None

    async def _engine(self, number: int) -> SmallEngine:
        return self._kind(number, self.wire)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SOON)

    def serve(self, app: web.Application, port: int = 0) -> int:
        async def start() -> int:
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
            self._runners.append(runner)
            return runner.addresses[0][1]

        return self.run(start())

    def start_sync(self) -> None:
        async def start() -> None:
            identity = Identity(fleet="quickstart", namespace="default", fleet_uid="fleet-uid", model="tiny")
            state = initial_state(identity, self.policy, self.timing)
            self.runtime = Runtime(state, self._status, FixedRoster(self._roster), WorkerCaller(TOKEN))
            self._stop = asyncio.Event()
            self._running = asyncio.ensure_future(self.runtime.run(self._stop))
            while not all(engine.admitted == self.runtime.state.version for engine in self.engines):
                await self.runtime.wait_for_change(self.runtime.clock.now() + 1)

        self.run(start())
        self.port = self.serve(build_app(self.runtime, TOKEN), self.port)

    def stop_sync(self) -> None:
        async def stop() -> None:
            self._stop.set()
            await self._running
            await self._runners.pop().cleanup()

        self.run(stop())

    def wait_until(self, condition: Callable[[Any], bool]) -> None:
        async def wait() -> None:
            while not condition(self.runtime.state):
                await self.runtime.wait_for_change(float("inf"))

        self.run(wait())

    def connect(self, **options: Any) -> rolloutfleet.Fleet:
        return rolloutfleet.connect(f"http://127.0.0.1:{self.port}", **{"token": TOKEN, "trainer": "first", **options})

    def weights(self, content: str = "v") -> dict[str, Any]:
        return {f"layer.{index}": self.wire.tensor(f"{content}{index}") for index in range(4)}

    async def _drain(self) -> None:
        # A connection may just have been accepted for a caller that is gone.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def close(self) -> None:
        self.stop_sync()
        for runner in self._runners:
            self.run(runner.cleanup())
        self.run(self._drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
