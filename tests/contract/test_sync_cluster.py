"""Status and roster in Kubernetes: one write where one is needed, and none where somebody else has written."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from fakes.apiserver import FakeApiServer
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet_sync.cluster import Api, ConfigMapRoster, WeightSyncStatus
from rolloutfleet_sync.protocol.summary import Readiness
from rolloutfleet_sync.store import StoreConflictError, StoreError

READY = Readiness(True, "AnswersTrainers", "2 of 2 engines hold version 0")
STATUS = {"phase": "Ready", "epoch": 4, "version": 2, "members": {"total": 2, "admitted": 2}}


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    made = FakeApiServer()
    made.url = await made.start()  # type: ignore[attr-defined]
    yield made
    await made.close()


@pytest.fixture
async def api(server: FakeApiServer) -> AsyncIterator[Api]:
    made = Api(ApiClient(Configuration(host=server.url)))  # type: ignore[attr-defined]
    yield made
    await made.close()


@pytest.fixture
def store(api: Api) -> WeightSyncStatus:
    return WeightSyncStatus(api, "ns", "f")


async def test_the_record_starts_from_the_floor(server: FakeApiServer, store: WeightSyncStatus):
    server.floor = {"epoch": 7, "version": 5}
    record = await store.read()
    assert (record.epoch, record.version) == (7, 5)
    server.status = {"epoch": 9, "version": 6}
    record = await store.read()
    assert (record.epoch, record.version) == (9, 6)


async def test_an_unchanged_status_is_not_written_again(server: FakeApiServer, store: WeightSyncStatus):
    await store.read()
    await store.write(STATUS, READY, 5)
    first = server.status["conditions"][0]
    assert (first["type"], first["status"], first["observedGeneration"]) == ("Ready", "True", 3)
    await store.write(STATUS, READY, 5)
    assert server.requests == ["GET", "PATCH"]
    await store.write(STATUS, Readiness(True, "AnswersTrainers", "1 of 2"), 5)
    assert server.requests == ["GET", "PATCH", "PATCH"]
    assert server.status["conditions"][0]["lastTransitionTime"] == first["lastTransitionTime"]


async def test_a_write_of_the_operator_in_between_is_no_conflict(server: FakeApiServer, store: WeightSyncStatus):
    await store.read()
    server.touch(conditions=[{"type": "Active", "status": "True", "lastTransitionTime": "t", "reason": "r"}])
    await store.write(STATUS, READY, 5)
    assert server.status["version"] == 2
    assert server.requests == ["GET", "PATCH", "GET", "PATCH"]


async def test_another_sync_jobs_epoch_is_never_overwritten(server: FakeApiServer, store: WeightSyncStatus):
    await store.read()
    server.touch(epoch=9, version=8)
    with pytest.raises(
        StoreConflictError, match="another sync job has written WeightSync ns/f: it holds epoch 9 and version 8"
    ):
        await store.write(STATUS, READY, 5)
    assert server.status["version"] == 8


async def test_a_commit_whose_answer_is_lost_is_found_written(server: FakeApiServer, store: WeightSyncStatus):
    await store.read()
    server.lose_answers = 1
    await store.write(STATUS, READY, 5)
    assert server.status["version"] == 2
    assert server.requests == ["GET", "PATCH", "GET"]


async def test_a_server_that_is_gone_is_told_within_the_deadline(server: FakeApiServer, store: WeightSyncStatus):
    await store.read()
    await server.close()
    with pytest.raises(StoreError, match=r"was not written within 0\.5 s"):
        await store.write(STATUS, READY, 0.5)
    with pytest.raises(StoreError, match="cannot be read"):
        await store.read()


async def test_rosters_are_followed_through_a_watch(server: FakeApiServer, api: Api):
    rosters = [Roster(fleet="f", fleet_uid="u", engines=engines, members=()) for engines in (1, 2, 3)]
    server.change_roster(rosters[0].model_dump_json(by_alias=True))
    server.changed.clear()
    watch = ConfigMapRoster(api, "ns", "f-members").watch()
    assert await anext(watch) == rosters[0]
    server.change_roster(rosters[1].model_dump_json(by_alias=True))
    assert await anext(watch) == rosters[1]
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_watch_that_ends_in_the_middle_of_a_line_is_begun_anew(server: FakeApiServer, api: Api):
    first, second = (Roster(fleet="f", fleet_uid="u", engines=engines, members=()) for engines in (1, 2))
    server.cut_watches = 1
    server.change_roster(first.model_dump_json(by_alias=True))
    server.changed.clear()
    watch = ConfigMapRoster(api, "ns", "f-members").watch()
    assert await anext(watch) == first
    server.change_roster(second.model_dump_json(by_alias=True))
    async with asyncio.timeout(5):
        assert await anext(watch) == second
    await watch.aclose()  # type: ignore[attr-defined]


async def test_the_roster_of_a_thousand_engines_arrives_through_a_watch(server: FakeApiServer, api: Api):
    members = tuple(
        Member(engine=engine, pod_name=f"f-{engine}-0-0", pod_uid=f"{engine:036}", address="10.244.101.231", ranks=1)
        for engine in range(1000)
    )
    roster = Roster(fleet="f", fleet_uid="u", engines=1000, members=members)
    watch = ConfigMapRoster(api, "ns", "f-members").watch()
    server.change_roster(Roster(fleet="f", fleet_uid="u", engines=0, members=()).model_dump_json(by_alias=True))
    server.changed.clear()
    await anext(watch)
    server.change_roster(roster.model_dump_json(by_alias=True))
    async with asyncio.timeout(5):
        assert await anext(watch) == roster
    await watch.aclose()  # type: ignore[attr-defined]
