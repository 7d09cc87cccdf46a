"""Who may speak to the sync job, for how long, and what a trainer hears that comes too late."""

import asyncio
from typing import Any

import aiohttp
import pytest

from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState


async def test_a_wrong_token_is_refused_on_every_route(fleet: Fleet, http: aiohttp.ClientSession):
    for token in ("", "secrets", "Secret", "sécret"):
        stranger = FakeTrainer(http, fleet.url, fleet.wire, token=token)
        for method, path in (("GET", "fleet"), ("POST", "sessions"), ("GET", "refits/r"), ("POST", "cache/reset")):
            with pytest.raises(ProblemError) as refused:
                await stranger.call(method, path)
            assert refused.value.code is ProblemCode.UNAUTHORIZED
    async with http.get(f"{fleet.url}/healthz/ready") as answer:
        assert answer.status == 200
        assert (await answer.text()).startswith("AnswersTrainers: 2 of 2 engines hold version 0")


async def test_bytes_that_are_no_text_are_a_wrong_token(fleet: Fleet):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.url.rpartition(":")[2]))
    writer.write(
        b"GET /rolloutfleet/v1/fleet HTTP/1.1\r\nHost: f\r\nAuthorization: Bearer \xff\xe9\r\nConnection: close\r\n\r\n"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    await writer.wait_closed()


async def test_a_worker_that_does_not_know_the_token_is_never_admitted(start_fleet: Any, http: aiohttp.ClientSession):
    fleet = await start_fleet(admitted=False, token="secret")
    fleet.workers[1].token = "another"
    await fleet.until(lambda state: "uid-f-1-0-0" in state.members)
    await fleet.until(lambda state: state.record is not None and state.members["uid-f-1-0-0"].failure is not None)
    view = await FakeTrainer(http, fleet.url, fleet.wire).fleet()
    assert view.members[1].message == "f-1-0-0: wrong token"


async def test_a_second_trainer_is_told_who_holds_the_fleet_and_for_how_long(
    fleet: Fleet, trainer: FakeTrainer, http: aiohttp.ClientSession
):
    await trainer.open()
    second = FakeTrainer(http, fleet.url, fleet.wire, name="t2")
    fleet.clock.skip(10)
    with pytest.raises(ProblemError) as refused:
        await second.open()
    assert refused.value.code is ProblemCode.SESSION_HELD
    assert str(refused.value).startswith("trainer t1 holds the fleet and its lease lasts ")
    assert "wait, close its session, or open with takeOver" in str(refused.value)
    await second.open(take_over=True)
    with pytest.raises(ProblemError) as lost:
        await trainer.request(1)
    assert lost.value.code is ProblemCode.SESSION_LOST
    assert "trainer t2 holds the fleet now" in str(lost.value)
    assert (await second.refit(1)).phase is Phase.COMPLETE


@pytest.mark.row("B04")
@pytest.mark.scenario("F04")
async def test_the_next_trainers_group_replaces_that_of_one_that_died(
    fleet: Fleet, trainer: FakeTrainer, http: aiohttp.ClientSession
):
    await trainer.open()
    first = await trainer.refit(1)
    fleet.clock.skip(31)
    await fleet.until(lambda state: state.session is None and state.group is None)
    second = FakeTrainer(http, fleet.url, fleet.wire, name="t2")
    await second.open()
    view = await second.refit(2)
    assert view.phase is Phase.COMPLETE
    assert view.epoch > first.epoch


async def test_a_lease_that_ends_aborts_the_refit_and_the_old_version_goes_on(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    for worker in fleet.workers:
        worker.event("receive").clear()
    view = await trainer.request(2)
    await trainer.follow(view, until=lambda v: v.phase is Phase.TRANSFERRING)
    for worker in fleet.workers:
        await worker.event("receive").wait()
    fleet.clock.skip(31)
    view = await trainer.wait_for(view.refit, Phase.FAILED)
    assert view.problem is not None
    assert view.problem.code is ProblemCode.SESSION_LOST
    assert view.problem.message.startswith(
        "the lease of trainer t1 ended: it made no call for 31 s, its lease is 30 s; "
    )
    assert (await trainer.fleet()).version == 1
    assert all(worker.engine.fence.state is WorkerState.DIRTY for worker in fleet.workers)


async def test_a_trainer_that_fails_frees_everybody(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.join is not None)
    await trainer.call("POST", f"refits/{view.refit}/failed", f'{{"epoch": {view.epoch}, "message": "out of memory"}}')
    view = await trainer.wait_for(view.refit, Phase.FAILED)
    assert view.problem is not None
    assert view.problem.message == "trainer t1 failed: out of memory"
    assert all(worker.engine.serves for worker in fleet.workers)


async def test_a_version_that_does_not_rise_is_refused_with_both_numbers(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(4)).phase is Phase.COMPLETE
    for version in (3, 4):
        with pytest.raises(ProblemError) as refused:
            await trainer.request(version)
        assert refused.value.code is ProblemCode.STALE_VERSION
        assert str(refused.value) == f"version {version} is not above the committed version 4; send 5 or higher"


@pytest.mark.scenario("F71")
async def test_repeated_calls_after_a_broken_connection_change_nothing(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.request(1)
    again = await trainer.request(1)
    assert again.refit == view.refit
    with pytest.raises(ProblemError) as other:
        await trainer.request(2)
    assert other.value.code is ProblemCode.WRONG_STATE
    view = await trainer.follow(view, until=lambda v: v.join is not None)
    await trainer.joined(view)
    await trainer.joined(view)
    view = await trainer.follow(view, until=lambda v: v.send is not None)
    await trainer.sent(view)
    await trainer.sent(view)
    view = await trainer.wait_for(view.refit, Phase.COMPLETE)
    repeated = await trainer.sent(view)
    assert repeated.phase is Phase.COMPLETE
    assert [worker.verbs.count("receive") for worker in fleet.workers] == [1, 1]


@pytest.mark.scenario("F77")
async def test_a_message_of_an_older_epoch_is_refused(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.join is not None)
    with pytest.raises(ProblemError) as refused:
        await trainer.joined(view.model_copy(update={"epoch": view.epoch - 1}))
    assert refused.value.code is ProblemCode.STALE_EPOCH
    assert (await trainer.follow(view)).phase is Phase.COMPLETE


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"version": 0, "manifest": {"tensors": []}}', "version: 0: Input should be greater than or equal to 1"),
        (
            '{"version": 1, "manifest": {"tensors": [{"name": "a", "dtype": "fp4", "shape": [1]}]}}',
            "tensor a: dtype 'fp4' is not one of",
        ),
        ("{", "Invalid JSON"),
        ('{"version": 1}', "manifest"),
    ],
)
async def test_a_malformed_request_names_field_and_value(trainer: FakeTrainer, body: str, words: str):
    await trainer.open()
    with pytest.raises(ProblemError) as refused:
        await trainer.call("POST", f"sessions/{trainer.session}/refits", body)
    assert refused.value.code is ProblemCode.INVALID_REQUEST
    assert words in str(refused.value)


async def test_an_unknown_route_or_refit_is_a_problem_too(trainer: FakeTrainer):
    for path in ("refits/none", "nowhere"):
        with pytest.raises(ProblemError) as refused:
            await trainer.call("GET", path)
        assert refused.value.code is ProblemCode.NOT_FOUND


async def test_a_long_poll_answers_with_the_next_change_or_when_its_time_is_over(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.request(1)
    await fleet.until(
        lambda state: state.active is not None and state.active.trainer_pending and not state.active.waiting
    )
    view = await trainer.poll(view.refit, wait=0)
    assert view.waiting_for == ("trainer",)
    poll = asyncio.ensure_future(trainer.poll(view.refit, after=view.sequence, wait=8))
    await asyncio.sleep(0.05)
    assert not poll.done()
    fleet.clock.skip(8)
    assert (await poll).sequence == view.sequence
    poll = asyncio.ensure_future(trainer.poll(view.refit, after=view.sequence, wait=8))
    await trainer.joined(view)
    assert (await poll).sequence > view.sequence
