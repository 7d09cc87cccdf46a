"""Two sync jobs for one fleet, and an API server that is away: the record decides, and workers obey the higher epoch."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from fakes.apiserver import FakeApiServer
from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_sync.cluster import Api, WeightSyncStatus
from rolloutfleet_sync.protocol.model import Identity, initial_state
from rolloutfleet_sync.protocol.summary import Readiness
from rolloutfleet_sync.runtime import Runtime
from rolloutfleet_sync.server import build_app
from rolloutfleet_sync.store import StoreConflictError
from rolloutfleet_sync.workers import WorkerCaller

READY = Readiness(True, "AnswersTrainers", "2 of 2 engines hold version 0")


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    made = FakeApiServer()
    made.url = await made.start()  # type: ignore[attr-defined]
    yield made
    await made.close()


@pytest.fixture
async def store(server: FakeApiServer) -> AsyncIterator[WeightSyncStatus]:
    api = Api(ApiClient(Configuration(host=server.url)))  # type: ignore[attr-defined]
    yield WeightSyncStatus(api, "ns", "f")
    await api.close()


@pytest.fixture
async def rival(fleet: Fleet, server: FakeApiServer) -> AsyncIterator["Rival"]:
    made = Rival(fleet, server)
    yield made
    await made.close()


class Rival:
    """Another sync job of the same fleet, with the same engines and the same record."""

    def __init__(self, fleet: Fleet, server: FakeApiServer) -> None:
        self._fleet = fleet
        self._api = Api(ApiClient(Configuration(host=server.url)))  # type: ignore[attr-defined]
        self.url = ""

    async def start(self) -> None:
        fleet = self._fleet
        state = initial_state(Identity("f", "ns", "fleet-uid", "model"), fleet.policy, fleet.timing)
        store = WeightSyncStatus(self._api, "ns", "f")
        self._runtime = Runtime(state, store, fleet.rosters, WorkerCaller(fleet.token), clock=fleet.clock)
        self._runner = web.AppRunner(build_app(self._runtime, fleet.token), access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._running = asyncio.ensure_future(self._runtime.run(asyncio.Event()))

    async def until_known(self) -> None:
        async with asyncio.timeout(8):
            while self._runtime.state.record is None or self._runtime.state.roster is None:
                await self._runtime.wait_for_change(self._fleet.clock.now() + 5)

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._runner.cleanup()
        await self._api.close()


@pytest.mark.scenario("F76")
async def test_of_two_sync_jobs_the_one_that_was_overtaken_ends_and_changes_nothing(
    fleet: Fleet, store: WeightSyncStatus, rival: Rival, http: aiohttp.ClientSession, server: FakeApiServer
):
    await fleet.kill_sync()
    fleet.store = store  # type: ignore[assignment]
    await fleet.start_sync()
    first = FakeTrainer(http, fleet.url, fleet.wire)
    await fleet.until(lambda state: state.record is not None and state.roster is not None)
    await first.open()
    assert (await first.refit(1)).phase is Phase.COMPLETE
    await rival.start()
    second = FakeTrainer(http, rival.url, fleet.wire, name="t2")
    await rival.until_known()
    await second.open()
    assert (await second.refit(2)).phase is Phase.COMPLETE
    request = asyncio.ensure_future(first.refit(3))
    with pytest.raises(StoreConflictError, match="another sync job has written WeightSync ns/f"):
        async with asyncio.timeout(8):
            await asyncio.shield(fleet._running)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert server.status["version"] == 2
    assert all(worker.engine.weights[0] == 2 for worker in fleet.workers)
    assert (await second.refit(3)).phase is Phase.COMPLETE
    assert all(worker.engine.serves and worker.engine.weights[0] == 3 for worker in fleet.workers)


async def test_a_commit_is_written_again_until_an_api_server_that_was_away_is_back(
    server: FakeApiServer, store: WeightSyncStatus
):
    await store.read()
    server.away = 3
    status = {"phase": "Committing", "epoch": 4, "version": 2, "members": {"total": 2, "admitted": 2}}
    await store.write(status, READY, 10)
    assert server.status["version"] == 2


async def test_a_refit_needs_the_api_server_for_its_intent_and_its_commit_alone(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.send is not None)
    fleet.store.down = True
    fleet.store.gate = asyncio.Event()
    following = asyncio.ensure_future(trainer.follow(view))
    async with asyncio.timeout(8):
        await fleet.store.committing.wait()
    fleet.store.down = False
    fleet.store.gate.set()
    assert (await following).phase is Phase.COMPLETE
    assert all(worker.engine.serves for worker in fleet.workers)
