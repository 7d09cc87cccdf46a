"""Rolling refits through the real sync server, to engines that hold weights behind real sockets."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.policy import PauseMode, RollingPolicy, Staging, Transport
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState

FIELDS = {"transport": Transport.AUTO, "engines": 6}


def serving(fleet: Fleet) -> list[int | None]:
    """By worker, the version that it serves; None where it refuses."""
    return [worker.engine.fence.version if worker.engine.serves else None for worker in fleet.workers]


def everybody_serves(fleet: Fleet, version: int) -> Callable[[], bool]:
    return lambda: serving(fleet) == [version] * len(fleet.workers)


class Watch:
    """Looks at the fleet after every act of an engine."""

    def __init__(self, fleet: Fleet, until: Callable[[], bool]):
        self.fewest = len(fleet.workers)
        self.most_versions = 0
        self._fleet, self._until = fleet, until

    def __call__(self) -> bool:
        states = [worker.engine.fence.state for worker in self._fleet.workers]
        self.fewest = min(self.fewest, states.count(WorkerState.SERVING))
        self.most_versions = max(self.most_versions, len({v for v in serving(self._fleet) if v is not None}))
        return self._until()


async def begin(start_fleet: Any, http: aiohttp.ClientSession, **fields: Any) -> tuple[Fleet, FakeTrainer]:
    fleet = await start_fleet(**{**FIELDS, "rolling": RollingPolicy(), **fields})
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await trainer.open()
    return fleet, trainer


async def test_the_trainer_sends_to_one_wave_and_the_others_follow_while_all_serve(
    start_fleet: Any, http: aiohttp.ClientSession
):
    fleet, trainer = await begin(start_fleet, http)
    view = await trainer.refit(1)
    assert view.phase is Phase.COMPLETE
    assert view.result is not None
    assert view.result.members == ("f-0-0-0",)
    watch = Watch(fleet, everybody_serves(fleet, 1))
    await fleet.wire.until(watch)
    assert (watch.fewest, watch.most_versions) == (6, 2)
    assert {worker.engine.weights for worker in fleet.workers} == {(1, "bytes-1")}
    taken = [worker.verbs.count("receive") + worker.verbs.count("borrow") for worker in fleet.workers]
    assert taken == [1] * 6


@pytest.mark.parametrize("at_a_time", [1, 2])
async def test_without_room_the_bound_holds_over_real_sockets(
    start_fleet: Any, http: aiohttp.ClientSession, at_a_time: int
):
    rolling = RollingPolicy(max_unavailable=at_a_time)
    fleet, trainer = await begin(start_fleet, http, rolling=rolling)
    for worker in fleet.workers:
        worker.engine.room_bytes = 0
    watch = Watch(fleet, everybody_serves(fleet, 1))
    watching = asyncio.ensure_future(fleet.wire.until(watch))
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    await watching
    assert watch.fewest == 6 - at_a_time


async def test_refits_in_a_row_wait_for_each_others_roll(start_fleet: Any, http: aiohttp.ClientSession):
    fleet, trainer = await begin(start_fleet, http, staging=Staging.NEVER, pause=PauseMode.WAIT)
    watch = Watch(fleet, everybody_serves(fleet, 3))
    watching = asyncio.ensure_future(fleet.wire.until(watch))
    for version in (1, 2, 3):
        assert (await trainer.refit(version)).phase is Phase.COMPLETE
    await watching
    assert (watch.fewest, watch.most_versions) == (5, 2)


async def test_the_status_counts_the_versions_that_are_served(start_fleet: Any, http: aiohttp.ClientSession):
    fleet, trainer = await begin(start_fleet, http, engines=3)
    for worker in fleet.workers[1:]:
        worker.engine.peer_fails = True
    await trainer.refit(1)

    def told() -> bool:
        members = fleet.store.document.get("members", {})
        return bool(members.get("stale") == 2)

    async with asyncio.timeout(8):
        while not told():
            fleet.clock.skip(1.0)
            await fleet.runtime.wait_for_change(fleet.clock.now() + 0.5)
    assert fleet.store.document["members"] == {
        "total": 3,
        "admitted": 1,
        "stale": 2,
        "oldestVersion": 0,
        "versions": [{"version": 1, "engines": 1}, {"version": 0, "engines": 2}],
    }
    seen = await trainer.fleet()
    assert [member.ready for member in seen.members] == [True] * 3
    assert len(seen.endpoints) == 3


@pytest.mark.parametrize("where", ["after the commit", "in the middle"])
async def test_a_new_sync_job_goes_on_with_the_roll(start_fleet: Any, http: aiohttp.ClientSession, where: str):
    fleet, trainer = await begin(start_fleet, http)
    for worker in fleet.workers[2:]:
        worker.engine.may_borrow.clear()
    await trainer.refit(1)
    if where == "in the middle":
        await fleet.wire.until(lambda: serving(fleet)[:2] == [1, 1])
    await fleet.kill_sync()
    for worker in fleet.workers[2:]:
        worker.engine.may_borrow.set()
    await fleet.start_sync()
    watch = Watch(fleet, everybody_serves(fleet, 1))
    await fleet.wire.until(watch)
    assert watch.fewest == 6


async def test_engines_end_their_staleness_by_themselves_when_no_sync_job_is_there(
    start_fleet: Any, http: aiohttp.ClientSession
):
    fleet, trainer = await begin(start_fleet, http, engines=2, rolling=RollingPolicy(max_stale_seconds=1))
    stale = fleet.workers[1].engine
    stale.peer_fails = True
    await trainer.refit(1)
    await fleet.wire.until(lambda: stale.report().stale_seconds is not None and stale.fence.admitted == 1)
    assert stale.serves
    await fleet.kill_sync()
    closed = asyncio.Event()

    async def set_door(*_: object, **__: object) -> None:
        closed.set()

    stale.vllm.set_door = set_door  # type: ignore[method-assign]
    async with asyncio.timeout(3):
        await closed.wait()
    assert not stale.serves
    assert "maxStaleSeconds" in stale.fence.unready_reason()


async def test_a_lender_that_dies_is_replaced_by_another_one_at_once(start_fleet: Any, http: aiohttp.ClientSession):
    fleet, trainer = await begin(start_fleet, http, engines=4, rolling=RollingPolicy(max_unavailable=2))
    held = fleet.workers[3].engine
    held.may_borrow.clear()
    await trainer.refit(1)
    await fleet.wire.until(lambda: held.borrowing.is_set())
    lender = next(worker for worker in fleet.workers if worker.engine.fence.lending)
    await lender.kill()
    held.peer_fails = True
    held.may_borrow.set()
    await fleet.until(lambda state: any(loan.attempts for loan in state.loans.values()))
    assert held.serves, "what came beside the live weights is forgotten, and nothing else has happened"
    held.peer_fails = False
    await fleet.wire.until(lambda: held.serves and held.fence.version == 1)
    assert held.weights == (1, "bytes-1")
