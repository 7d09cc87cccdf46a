"""Which way weights take, what is prepared and staged, who gets them from a peer, and what a sleeping fleet does."""

import asyncio
from typing import Any

import aiohttp
import pytest

from fakes.engine import SWAP_SECONDS
from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.policy import PauseMode, Staging, Transport, Wire
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import FleetView, Phase, RefitResult, RefitView
from rolloutfleet.contract.worker import Join, Locality, Prepare, WorkerState
from rolloutfleet_sync.protocol.summary import summarize_status

HOST = Locality(host="boot-1 ipc-1", memory="shm-1")
StartFleet = Any


async def start(
    start_fleet: StartFleet, http: aiohttp.ClientSession, *, calibrated: bool = True, **fields: Any
) -> tuple[Fleet, FakeTrainer]:
    """A fleet whose layouts have been compared with a load before, and a trainer with an open session."""
    fleet: Fleet = await start_fleet(**{"transport": Transport.AUTO} | fields)
    for worker in fleet.workers:
        worker.engine.calibrated = calibrated
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await trainer.open()
    return fleet, trainer


def result_of(view: RefitView) -> RefitResult:
    assert view.phase is Phase.COMPLETE, view.problem
    assert view.result is not None
    return view.result


def calls_of(fleet: Fleet, engine: int, name: str) -> list[Any]:
    return [call for called, call in fleet.workers[engine].engine.calls if called == name]


# The choice.


async def test_auto_takes_layout_and_says_why_nothing_faster(start_fleet: StartFleet, http: aiohttp.ClientSession):
    fleet, trainer = await start(start_fleet, http, calibrated=False)
    result = result_of(await trainer.refit(1))
    assert (result.transport, result.staged) == (Transport.LAYOUT, False)
    assert result.reason.startswith("Layout over Gloo: the tensors of trainer t1 are not in memory that it can share")
    assert result.reason.endswith("not staged, for the layout of rank 0 of f-0-0-0 has not been verified by a load yet")
    assert result.detours == ("2 tensors: not yet compared with a load through vLLM's loader",)
    assert result.slowest in {"f-0-0-0 rank 0", "f-1-0-0 rank 0"}
    (join,) = calls_of(fleet, 0, "Join")
    assert isinstance(join, Join)
    assert (join.transport, join.wire, join.trainer_ranks) == (Transport.LAYOUT, Wire.GLOO, 1)
    state = fleet.runtime.state
    assert state.record is not None
    last = summarize_status(state, state.record)["lastRefit"]
    assert (last["transport"], last["reason"], last["staged"]) == ("Layout", result.reason, False)
    assert (last["detours"], last["slowest"]) == (list(result.detours), result.slowest)


async def test_auto_takes_colocated_where_memory_is_shared(start_fleet: StartFleet, http: aiohttp.ClientSession):
    fleet = await start_fleet(transport=Transport.AUTO)
    for worker in fleet.workers:
        worker.engine.locality = HOST
        await worker.restart()
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await trainer.open(locality=HOST, devices=("cpu",))
    result = result_of(await trainer.refit(1))
    assert result.transport is Transport.COLOCATED
    assert result.reason.startswith(
        "Colocated through shared memory: trainer and engines share the memory of one host; not staged"
    )
    assert [join.wire for join in calls_of(fleet, 0, "Join")] == [Wire.MEMORY]


async def test_a_transport_that_is_asked_for_and_cannot_be_is_a_problem_that_names_who_cannot(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, transport=Transport.COLOCATED)
    view = await trainer.refit(1)
    assert view.problem is not None
    assert (view.problem.code, view.problem.member) == (ProblemCode.TRANSPORT_UNAVAILABLE, "trainer")
    assert view.problem.message == (
        "refit.transport is Colocated, but the tensors of trainer t1 are not in memory that it can share; "
        "nothing was paused or changed"
    )
    assert all(not {"join", "pause"} & set(worker.verbs) and worker.engine.serves for worker in fleet.workers)


async def test_several_trainer_ranks_come_before_all_workers(start_fleet: StartFleet, http: aiohttp.ClientSession):
    fleet = await start_fleet(transport=Transport.AUTO, ranks=2)
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    with pytest.raises(ProblemError, match="fleet f has 7: 4 workers on 2 engines and 3 trainer ranks"):
        await trainer.open(ranks=3, world_size=5)
    await trainer.open(ranks=3, world_size=7)
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.join is not None)
    assert view.join is not None
    assert (view.join.trainer_ranks, view.join.world_size) == (3, 7)
    result_of(await trainer.follow(view))
    assert [calls_of(fleet, engine, "Join")[0].rank_offset for engine in range(2)] == [3, 5]


# Preparing.


@pytest.mark.row("A37")
async def test_what_was_prepared_is_not_prepared_again(start_fleet: StartFleet, http: aiohttp.ClientSession):
    fleet, trainer = await start(start_fleet, http, staging=Staging.NEVER)
    first = result_of(await trainer.refit(1))
    assert "Preparing" in first.seconds
    before = [len(worker.verbs) for worker in fleet.workers]
    second = result_of(await trainer.refit(2))
    assert "Preparing" not in second.seconds
    for worker, seen in zip(fleet.workers, before, strict=True):
        assert worker.verbs[seen:] == ["pause", "receive", "commit", "resume"]
        assert worker.engine.weights == (2, "bytes-2")


async def test_layouts_that_a_load_has_verified_are_prepared_for_the_next_refit(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, calibrated=False, ranks=2)
    assert not result_of(await trainer.refit(1)).staged
    second = result_of(await trainer.refit(2))
    assert second.staged
    assert second.detours == ()
    prepares = calls_of(fleet, 1, "Prepare")
    assert all(isinstance(prepare, Prepare) for prepare in prepares)
    assert [(prepare.layouts, prepare.staged) for prepare in prepares] == [
        (("detoured",) * 4, False),
        (("placed-0", "placed-1", "placed-0", "placed-1"), True),
    ]
    result_of(await trainer.refit(3))
    assert len(calls_of(fleet, 1, "Prepare")) == 2
    assert len(calls_of(fleet, 1, "Join")) == 1
    assert len(calls_of(fleet, 1, "Check")) == 1


async def test_a_preparation_that_fails_leaves_every_engine_serving(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, min_ready=2)
    fleet.workers[1].refuses["prepare"] = ProblemError(ProblemCode.TRANSFER_FAILED, "out of memory for tables")
    view = await trainer.refit(1)
    assert view.problem is not None
    assert (view.problem.phase, view.problem.member) == ("Preparing", "f-1-0-0")
    assert all("pause" not in worker.verbs and worker.engine.serves for worker in fleet.workers)
    fleet.workers[1].refuses.clear()
    result_of(await trainer.refit(1))


# Staging.


async def test_a_staged_version_arrives_while_engines_serve_and_is_swapped_in(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.send is not None)
    async with asyncio.timeout(5):
        for worker in fleet.workers:
            await worker.event("receive").wait()
    assert fleet.store.document["intent"]["version"] == 1
    assert all(worker.engine.serves and worker.engine.weights == (0, "") for worker in fleet.workers)
    result = result_of(await trainer.follow(view))
    assert result.staged
    assert result.pause_seconds == SWAP_SECONDS
    assert not {"Pausing", "Resuming"} & set(result.seconds)
    for worker in fleet.workers:
        assert worker.verbs[-2:] == ["receive", "commit"]
        assert worker.engine.weights == (1, "bytes-1")
        assert worker.engine.serves
    assert len((await trainer.fleet()).endpoints) == 2


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
async def test_where_requests_must_not_see_two_versions_the_staged_one_is_copied_in_a_pause(
    start_fleet: StartFleet, http: aiohttp.ClientSession, mode: PauseMode
):
    fleet, trainer = await start(start_fleet, http, pause=mode)
    result = result_of(await trainer.refit(1))
    assert result.staged
    paused = result.seconds["Pausing"] + result.seconds["Resuming"]
    assert paused < result.pause_seconds < sum(result.seconds.values())
    for worker in fleet.workers:
        assert worker.verbs[-4:] == ["receive", "pause", "commit", "resume"]
        assert worker.engine.serves


@pytest.mark.parametrize("trouble", ["corrupt", "broken", "trainer"])
async def test_a_staged_failure_leaves_every_engine_serving_the_version_before(
    start_fleet: StartFleet, http: aiohttp.ClientSession, trouble: str
):
    fleet, trainer = await start(start_fleet, http, min_ready=2)
    result_of(await trainer.refit(1))
    for worker in fleet.workers:
        worker.engine.ranks.began.clear()
    fleet.workers[1].engine.corrupts = trouble == "corrupt"
    view = await trainer.follow(await trainer.request(2), until=lambda v: v.send is not None)
    async with asyncio.timeout(5):
        for worker in fleet.workers:
            await worker.engine.ranks.began.wait()
    if trouble == "broken":
        fleet.workers[1].engine.break_transfer("connection reset")
    elif trouble == "trainer":
        body = f'{{"epoch": {view.epoch}, "message": "out of memory"}}'
        await trainer.call("POST", f"refits/{view.refit}/failed", body)
    view = await trainer.follow(view)
    assert view.phase is Phase.FAILED
    for worker in fleet.workers:
        assert worker.engine.serves
        assert worker.engine.fence.state is WorkerState.SERVING
        assert worker.engine.weights == (1, "bytes-1")
        assert "pause" not in worker.verbs
    fleet.workers[1].engine.corrupts = False
    assert result_of(await trainer.refit(2)).staged


async def test_a_staged_version_that_a_dead_sync_job_has_committed_is_swapped_in_by_its_successor(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    fleet.workers[1].refuses["commit"] = ProblemError(ProblemCode.ENGINE_FAILED, "not now")
    fleet.workers[0].hangs.add("commit")
    view = await trainer.follow(await trainer.request(3), until=lambda v: v.send is not None)
    await trainer.sent(view)
    async with asyncio.timeout(5):
        await fleet.workers[1].event("commit").wait()
    await fleet.kill_sync()
    fleet.workers[1].refuses.clear()
    fleet.workers[0].hangs.clear()
    await fleet.start_sync()
    await fleet.until_admitted()
    await fleet.wire.until(lambda: all(worker.engine.weights == (3, "bytes-3") for worker in fleet.workers))
    assert all("pause" not in worker.verbs for worker in fleet.workers)


async def test_a_staged_version_that_was_never_committed_is_forgotten_by_a_successor(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.send is not None)
    async with asyncio.timeout(5):
        for worker in fleet.workers:
            await worker.event("receive").wait()
    await fleet.kill_sync()
    fleet.wire.send(view.epoch, 1, "bytes-1")
    await fleet.start_sync()
    await fleet.wire.until(lambda: all(not worker.engine.fence.staged for worker in fleet.workers))
    assert all(worker.engine.serves and worker.engine.weights == (0, "") for worker in fleet.workers)


async def test_engines_without_room_receive_in_place(start_fleet: StartFleet, http: aiohttp.ClientSession):
    fleet, trainer = await start(start_fleet, http)
    fleet.workers[1].engine.room_bytes = 37
    result = result_of(await trainer.refit(1))
    assert not result.staged
    assert result.reason.endswith("not staged, for rank 0 of f-1-0-0 has room for 3.7e-08 GB of 3.8e-08 GB")
    assert result.pause_seconds > 0
    assert "Pausing" in result.seconds


# Late joiners.


@pytest.mark.scenario("F62")
@pytest.mark.scenario("F63")
async def test_a_late_engine_takes_the_version_from_a_peer_and_serves_without_a_refit(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    result_of(await trainer.refit(7))
    late = fleet.workers[1]
    before = len(late.verbs)
    await late.restart()
    await fleet.wire.until(lambda: late.engine.serves)
    assert late.engine.weights == (7, "bytes-7")
    assert late.verbs[before:] == ["admit", "borrow", "commit", "resume"]
    assert fleet.workers[0].engine.serves
    assert (await trainer.refit(8)).phase is Phase.COMPLETE
    assert late.engine.weights == (8, "bytes-8")


async def test_several_late_engines_are_served_by_several_donors_at_once(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, engines=5)
    result_of(await trainer.refit(1))
    late = fleet.workers[2:]
    for worker in late:
        await worker.restart()
        worker.engine.may_borrow.clear()
    await fleet.until(lambda state: sum(loan.lent is not None for loan in state.loans.values()) == 2)
    assert len({loan.donor for loan in fleet.runtime.state.loans.values() if loan.donor}) == 2
    for worker in late:
        worker.engine.may_borrow.set()
    await fleet.wire.until(lambda: all(worker.engine.serves for worker in late))
    assert all(worker.verbs.count("borrow") == 1 for worker in late), "each donor lends to one peer at a time"


async def test_a_loan_that_fails_is_named_and_made_again_from_another_peer(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http, engines=3)
    result_of(await trainer.refit(1))
    for donor in fleet.workers[:2]:
        donor.refuses["lend"] = ProblemError(ProblemCode.ENGINE_FAILED, "no port is free")
    late = fleet.workers[2]
    await late.restart()
    await fleet.until(lambda state: any(loan.attempts >= 2 for loan in state.loans.values()))
    assert all("lend" in donor.verbs for donor in fleet.workers[:2])
    member = (await trainer.fleet()).members[2]
    assert "could not borrow version 1 from f-1-0-0: f-1-0-0: no port is free" in member.message
    assert not member.ready
    for donor in fleet.workers[:2]:
        donor.refuses.clear()
    await fleet.wire.until(lambda: late.engine.serves)


async def test_a_refit_that_begins_ends_a_loan_and_brings_the_late_engine_along(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    result_of(await trainer.refit(1))
    late = fleet.workers[1]
    await late.restart()
    late.engine.may_borrow.clear()
    async with asyncio.timeout(5):
        await late.engine.borrowing.wait()
    result_of(await trainer.refit(2))
    assert not fleet.workers[0].engine.fence.lending
    assert all(worker.engine.serves and worker.engine.weights == (2, "bytes-2") for worker in fleet.workers)


async def test_a_donor_that_dies_leaves_the_late_engine_fenced_and_told_why(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    result_of(await trainer.refit(1))
    late = fleet.workers[1]
    await late.restart()
    late.engine.may_borrow.clear()
    async with asyncio.timeout(5):
        await late.engine.borrowing.wait()
    await fleet.workers[0].kill()
    late.engine.peer_fails = True
    late.engine.may_borrow.set()
    await fleet.wire.until(lambda: late.engine.fence.state is WorkerState.DIRTY)
    await fleet.until(lambda state: any(loan.problem for loan in state.loans.values()))
    assert "could not borrow version 1 from f-0-0-0" in (await trainer.fleet()).members[1].message


# Sleep.


async def sleep(trainer: FakeTrainer, level: int) -> FleetView:
    return FleetView.model_validate_json(await trainer.call("POST", "sleep", f'{{"level": {level}}}'))


async def wake(trainer: FakeTrainer, *tags: str) -> FleetView:
    listed = ", ".join(f'"{tag}"' for tag in tags)
    return FleetView.model_validate_json(await trainer.call("POST", "wake", f'{{"tags": [{listed}]}}'))


async def test_a_fleet_that_sleeps_lightly_holds_its_version_and_wakes_as_it_was(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    result_of(await trainer.refit(1))
    view = await sleep(trainer, 1)
    assert [member.state for member in view.members] == [WorkerState.ASLEEP] * 2
    assert [member.message for member in view.members] == ["sleeps at level 1"] * 2
    assert view.endpoints == ()
    async with http.get(f"{fleet.url}/healthz/ready") as answer:
        assert (await answer.text()).strip() == "AnswersTrainers: 2 of 2 engines hold version 1, 2 of them asleep"
    view = await wake(trainer)
    assert [member.ready for member in view.members] == [True, True]
    assert all(worker.engine.weights == (1, "bytes-1") for worker in fleet.workers)
    assert result_of(await trainer.refit(2)).staged
    assert len(calls_of(fleet, 0, "Prepare")) == 2, "the second buffer was freed for the sleep"


@pytest.mark.scenario("F49")
async def test_a_refit_of_a_sleeping_fleet_fails_at_once_and_says_what_to_call(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    await sleep(trainer, 1)
    view = await trainer.refit(1)
    assert view.problem is not None
    assert (view.problem.code, view.problem.phase) == (ProblemCode.WRONG_STATE, "Forming")
    assert view.problem.message == (
        "f-0-0-0, f-1-0-0 sleep: wake the fleet first, at least its tag weights, with POST wake or Fleet.wake()"
    )
    assert all("check" not in worker.verbs for worker in fleet.workers)


@pytest.mark.scenario("F50")
async def test_a_fleet_that_slept_deeply_is_fenced_until_it_is_refitted(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    result_of(await trainer.refit(1))
    view = await sleep(trainer, 2)
    message = "sleeps at level 2, and holds no weights until it is woken and refitted"
    assert [member.message for member in view.members] == [message] * 2
    view = await wake(trainer, "weights")
    assert [member.ready for member in view.members] == [False, False]
    result = result_of(await trainer.refit(2))
    assert not result.staged
    assert not any(worker.engine.serves for worker in fleet.workers)
    view = await wake(trainer, "kv_cache")
    assert [member.ready for member in view.members] == [True, True]
    assert all(worker.engine.weights == (2, "bytes-2") for worker in fleet.workers)


async def test_a_fleet_that_woke_wholly_from_deep_sleep_is_refitted_too(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    await sleep(trainer, 2)
    await wake(trainer)
    assert [worker.engine.fence.state for worker in fleet.workers] == [WorkerState.DIRTY] * 2
    result_of(await trainer.refit(1))
    assert all(worker.engine.serves for worker in fleet.workers)


async def test_sleep_is_refused_during_a_refit_and_a_refit_waits_for_the_sleep(
    start_fleet: StartFleet, http: aiohttp.ClientSession
):
    fleet, trainer = await start(start_fleet, http)
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.send is not None)
    with pytest.raises(ProblemError, match="engines do not sleep in phase Transferring; wait for the end of the refit"):
        await sleep(trainer, 1)
    result_of(await trainer.follow(view))
    fleet.workers[1].hangs.add("sleep")
    asked = asyncio.ensure_future(sleep(trainer, 1))
    async with asyncio.timeout(5):
        await fleet.workers[1].event("sleep").wait()
    with pytest.raises(ProblemError, match="engines do not wake while the fleet is asked to sleep; try again"):
        await wake(trainer)
    view = await trainer.request(2)
    assert view.phase is Phase.PENDING
    fleet.workers[1].hangs.clear()
    await fleet.workers[1].kill()
    with pytest.raises(ProblemError, match="f-1-0-0 of 2 engines did not sleep: f-1-0-0 at 127"):
        await asked
    await trainer.wait_for(view.refit, Phase.FORMING)


async def test_an_engine_that_refuses_to_sleep_is_named(start_fleet: StartFleet, http: aiohttp.ClientSession):
    fleet, trainer = await start(start_fleet, http)
    fleet.workers[1].engine.sleep_refusal = "vLLM runs without --enable-sleep-mode"
    with pytest.raises(ProblemError) as refused:
        await sleep(trainer, 1)
    assert refused.value.problem.member == "f-1-0-0"
    assert "f-1-0-0 of 2 engines did not sleep: f-1-0-0: vLLM runs without --enable-sleep-mode" in str(refused.value)
    assert fleet.workers[0].engine.fence.state is WorkerState.ASLEEP
