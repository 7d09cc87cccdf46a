"""Refits through the real sync server that lose members and go on without them."""

import asyncio
from typing import Any

import aiohttp
import pytest

from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.policy import OnFailure, RefitDeadlines, Transport
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState


async def start(start_fleet: Any, http: aiohttp.ClientSession, **fields: Any) -> tuple[Fleet, FakeTrainer]:
    """Three engines at version 1 and a trainer with an open session."""
    fleet = await start_fleet(**{"engines": 3} | fields)
    for worker in fleet.workers:
        worker.engine.calibrated = True
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    return fleet, trainer


@pytest.mark.scenario("F60")
@pytest.mark.scenario("F67")
@pytest.mark.parametrize("transport", [Transport.GLOO, Transport.AUTO], ids=["in place", "staged"])
async def test_a_worker_killed_in_mid_transfer_costs_nobody_else_the_version(
    start_fleet: Any, http: aiohttp.ClientSession, transport: Transport
):
    fleet, trainer = await start(start_fleet, http, transport=transport)
    for worker in fleet.workers:
        worker.event("receive").clear()
    view = await trainer.follow(await trainer.request(2), until=lambda v: v.send is not None)
    first = view.epoch
    for worker in fleet.workers:
        await worker.event("receive").wait()
    started = fleet.clock.now()
    lost = fleet.workers.pop(1)
    await lost.kill()
    async with asyncio.timeout(8):
        view = await trainer.follow(await trainer.poll(view.refit, wait=0))
    assert fleet.clock.now() - started < 3
    assert (view.phase, view.attempt) == (Phase.COMPLETE, 2)
    assert view.epoch > first
    assert view.result is not None
    assert view.result.members == ("f-0-0-0", "f-2-0-0")
    assert [(each.pod_name, each.phase) for each in view.result.attempts[0].lost] == [("f-1-0-0", "Transferring")]
    for worker in fleet.workers:
        assert worker.engine.serves
        assert worker.engine.weights == (2, "bytes-2")
    fleet.workers.insert(1, await fleet.new_worker(1, incarnation=1).start())
    fleet.rosters.change(fleet.make_roster())
    await fleet.until_admitted()
    assert fleet.workers[1].engine.weights == (2, "bytes-2")
    view = await trainer.refit(3)
    assert view.result is not None
    assert len(view.result.members) == 3


@pytest.mark.scenario("F19")
async def test_a_member_that_dies_while_the_others_join_frees_them(start_fleet: Any, http: aiohttp.ClientSession):
    fleet, trainer = await start(start_fleet, http)
    await trainer.call("DELETE", f"sessions/{trainer.session}")
    await trainer.open()
    for worker in fleet.workers:
        worker.event("join").clear()
    fleet.workers[1].hangs.add("join")
    view = await trainer.request(2)
    await fleet.workers[1].event("join").wait()
    lost = fleet.workers.pop(1)
    await lost.kill()
    async with asyncio.timeout(8):
        view = await trainer.follow(await trainer.poll(view.refit, wait=0))
    assert (view.phase, view.attempt) == (Phase.COMPLETE, 2)


@pytest.mark.scenario("F66")
async def test_a_fleet_told_to_hold_refuses_requests_after_a_failed_refit_until_the_next_completes(
    start_fleet: Any, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, transport=Transport.AUTO, on_failure=OnFailure.HOLD, engines=2)
    view = await trainer.follow(await trainer.request(2), until=lambda v: v.send is not None)
    body = f'{{"epoch": {view.epoch}, "message": "loss is NaN"}}'
    await trainer.call("POST", f"refits/{view.refit}/failed", body)
    assert (await trainer.follow(view)).phase is Phase.FAILED
    engines = [worker.engine for worker in fleet.workers]
    await fleet.until(lambda _: not any(engine.serves for engine in engines))
    for engine in engines:
        assert engine.fence.state is WorkerState.SERVING
        assert engine.fence.unready_reason().startswith("Held: the refit of version 2 failed: ")
        assert not engine.vllm.paused
        assert engine.weights == (1, "bytes-1")
    shown = await trainer.fleet()
    assert "loss is NaN" in shown.held
    assert shown.endpoints == ()
    assert (await trainer.refit(2)).phase is Phase.COMPLETE
    assert all(engine.serves for engine in engines)
    assert (await trainer.fleet()).held == ""


async def test_held_engines_stay_so_over_a_restart_of_the_sync_job_and_serve_when_released(
    start_fleet: Any, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, on_failure=OnFailure.HOLD, engines=2)
    await trainer.follow(await trainer.request(2), until=lambda v: v.join is not None or v.send is not None)
    await trainer.call("DELETE", f"sessions/{trainer.session}")
    engines = [worker.engine for worker in fleet.workers]
    await fleet.until(lambda state: bool(state.record and state.record.held))
    await fleet.until(lambda _: not any(engine.serves for engine in engines))
    await fleet.kill_sync()
    await fleet.start_sync()
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await fleet.until(lambda state: state.record is not None and bool(state.members))
    assert (await trainer.fleet()).held
    await trainer.call("POST", "release")
    dirty = [engine for engine in engines if engine.fence.state is WorkerState.DIRTY]
    await fleet.until(lambda _: all(engine.serves or engine in dirty for engine in engines))
    assert (await trainer.fleet()).held == ""


async def test_a_member_that_refuses_is_named_in_the_status_of_the_refit_that_went_on(
    start_fleet: Any, http: aiohttp.ClientSession
):
    deadlines = RefitDeadlines(forming_seconds=30)
    fleet, trainer = await start(start_fleet, http, transport=Transport.AUTO, deadlines=deadlines)
    await trainer.call("DELETE", f"sessions/{trainer.session}")
    await trainer.open()
    fleet.workers[1].refuses["prepare"] = ProblemError(ProblemCode.TRANSFER_FAILED, "out of memory")
    view = await trainer.refit(2)
    assert view.phase is Phase.COMPLETE
    await fleet.until(lambda state: state.active is None)
    fleet.clock.skip(2)
    entry = await _stored(fleet, 2)
    assert [(each["lost"], each["phase"], each["why"]) for each in entry["attempts"]] == [
        (["f-1-0-0"], "Preparing", "f-1-0-0: out of memory")
    ]


async def _stored(fleet: Fleet, version: int) -> dict[str, Any]:
    async with asyncio.timeout(8):
        while True:
            rows = [row for row in fleet.store.document.get("refits", ()) if row["version"] == version]
            if rows:
                return dict(rows[-1])
            fleet.clock.skip(1)
            await asyncio.sleep(0.02)
