"""A refit of a whole engine pod into its live weights, and whatever goes wrong on the way."""

import asyncio
import threading

import pytest

from fakes.pod import JOIN
from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet_worker.fence import Door
from rolloutfleet_worker.rank.link import RankError

COMMITTED = {"version": 1, "cacheReset": True, "state": "Paused", "pauseSeconds": None}


@pytest.mark.scenario("F13")
async def test_every_local_rank_joins_at_the_offset_plus_its_own_rank(pod):
    status, answer = await pod.call("join", **JOIN)
    assert (status, answer["ranks"]) == (200, [3, 4])
    assert [rank.joined_as for rank in pod.ranks] == [3, 4]


async def test_a_refit_goes_through_pause_receive_commit_and_resume(pod):
    await pod.paused_and_joined()
    assert pod.engine.paused
    status, received = await pod.receive()
    assert (status, received["receivedDigests"]) == (200, ["received-0", "received-1"])
    assert received["liveDigests"] == ["live-0", "live-1"]
    status, committed = await pod.call("commit", version=1, cache="Reset")
    assert (status, committed) == (200, COMMITTED)
    status, report = await pod.call("resume")
    assert (status, report["state"], report["version"]) == (200, "Serving", 1)
    assert not pod.engine.paused
    assert (pod.engine.door, pod.engine.version) == (Door.OPEN, 1)
    assert await pod.ready() == (True, "")


async def test_a_pause_within_its_deadline_stays_ready(pod):
    await pod.paused_and_joined()
    assert await pod.ready() == (True, "")


@pytest.mark.row("B51")
@pytest.mark.scenario("F45")
async def test_a_rank_that_fails_half_way_makes_the_pod_dirty_and_not_ready(pod):
    await pod.paused_and_joined()
    pod.ranks[1].failure = RankError("rank 1: connection lost", touched=True)
    status, problem = await pod.receive()
    assert (status, problem["code"], problem["member"]) == (500, "TransferFailed", "f-0-0-0")
    assert "rank 1: connection lost" in problem["message"]
    is_ready, reason = await pod.ready()
    assert not is_ready
    assert reason.startswith("Dirty: the transfer of version 1 ended half way")
    assert pod.engine.door is Door.CLOSED
    status, problem = await pod.call("resume")
    assert (status, problem["code"]) == (409, "Dirty")
    assert pod.engine.paused


async def test_one_rank_loaded_and_one_untouched_is_still_a_mixture(pod):
    await pod.paused_and_joined()
    pod.ranks[1].failure = RankError("rank 1: refused before anything arrived", touched=False)
    await pod.receive()
    assert (await pod.ready())[1].startswith("Dirty")


async def test_a_transfer_that_never_began_leaves_the_old_version_serving(pod):
    await pod.paused_and_joined()
    for rank in pod.ranks:
        rank.failure = RankError("no bytes came", touched=False)
    assert (await pod.receive())[0] == 500
    status, report = await pod.call("abort", reason="the trainer is gone")
    assert (status, report["state"]) == (200, "Serving")
    assert await pod.ready() == (True, "")


@pytest.mark.scenario("F60")
async def test_an_abort_unblocks_a_transfer_in_flight(pod):
    await pod.paused_and_joined()
    for rank in pod.ranks:
        rank.aborted.clear()
        rank.blocks = True
    transfer = asyncio.create_task(pod.receive(deadline=60))
    for rank in pod.ranks:
        await asyncio.to_thread(rank.entered.wait, 10)
    status, report = await pod.call("abort", reason="a peer died")
    assert (status, report["state"]) == (200, "Dirty")
    assert (await transfer)[0] == 500


async def test_a_transfer_past_its_deadline_is_aborted_from_inside(pod):
    await pod.paused_and_joined()
    for rank in pod.ranks:
        rank.aborted.clear()
        rank.blocks = True
    status, problem = await pod.receive(deadline=0.2)
    assert (status, problem["code"]) == (500, "PeerLost")
    assert all(rank.aborted.is_set() for rank in pod.ranks)


@pytest.mark.scenario("F66")
async def test_a_pause_that_the_sync_job_forgot_ends_by_itself(pod):
    await pod.call("admit", version=0)
    resumed = asyncio.Event()
    resume = pod.engine.resume

    async def noticed(deadline_seconds: float):
        await resume(deadline_seconds)
        resumed.set()

    pod.engine.resume = noticed
    await pod.call("pause", mode="Keep", deadlineSeconds=0.2)
    await asyncio.wait_for(resumed.wait(), 10)
    assert pod.pod.fence.state == "Serving"


@pytest.mark.scenario("F53")
@pytest.mark.row("A42")
@pytest.mark.parametrize(
    "answer", [False, ProblemError(ProblemCode.ENGINE_FAILED, "vLLM answered reset-cache with 500")]
)
async def test_a_cache_that_is_not_reset_fences_the_pod_however_often_the_commit_is_repeated(pod, answer):
    await pod.paused_and_joined()
    await pod.receive()
    pod.engine.cache_resets = answer
    status, committed = await pod.call("commit", version=1, cache="Reset")
    assert (status, committed["cacheReset"]) == (200, False)
    assert (await pod.ready())[1].startswith("Dirty: the prefix cache could not be reset for version 1")
    pod.engine.cache_resets = True
    status, problem = await pod.call("commit", version=1, cache="Reset")
    assert (status, problem["code"]) == (409, "StaleVersion")
    assert (await pod.call("resume"))[0] == 409
    assert pod.engine.door is Door.CLOSED


async def test_a_repeated_commit_reports_the_reset_that_was_made_and_makes_no_other(pod):
    await pod.paused_and_joined()
    await pod.receive()
    for _ in range(2):
        assert await pod.call("commit", version=1, cache="Reset") == (200, COMMITTED)
    assert pod.engine.resets == 1


@pytest.mark.scenario("F66")
async def test_a_pause_that_vllm_never_finished_is_ended_by_the_abort(pod):
    await pod.call("admit", version=0)

    async def never_drained(mode: PauseMode, deadline_seconds: float):
        pod.engine.paused = True
        raise ProblemError(ProblemCode.DEADLINE_EXCEEDED, "vLLM did not finish pause within 1 s")

    pod.engine.pause = never_drained
    assert (await pod.call("pause", mode="Wait", deadlineSeconds=30))[0] == 504
    assert (await pod.call("abort", reason="phase Pausing ended"))[0] == 200
    assert not pod.engine.paused


@pytest.mark.scenario("F66")
async def test_an_engine_that_is_paused_although_nobody_paused_it_is_resumed(pod):
    pod.engine.paused = True
    await pod.pod.reconcile_pause(paused=True)
    assert not pod.engine.paused


@pytest.mark.scenario("F03")
async def test_a_rank_that_fails_ends_the_wait_of_the_others_at_once(pod):
    await pod.paused_and_joined()
    for rank in pod.ranks:
        rank.aborted.clear()
    pod.ranks[0].blocks = True
    pod.ranks[1].failure = RankError("rank 1: refused", touched=False)
    status, problem = await asyncio.wait_for(pod.receive(deadline=600), 10)
    assert status == 500
    assert "rank 1: refused" in problem["message"]


@pytest.mark.scenario("F65")
async def test_a_rank_that_ignores_the_abort_gets_the_engine_killed(pod, monkeypatch):
    monkeypatch.setattr("rolloutfleet_worker.ranks.ABORT_SECONDS", 0.2)
    await pod.paused_and_joined()
    for rank in pod.ranks:
        rank.aborted = threading.Event()
        rank.blocks = True
        rank.abort = lambda: None
    status, problem = await pod.receive(deadline=0.1)
    assert (status, problem["code"]) == (504, "DeadlineExceeded")
    assert pod.killed
    for rank in pod.ranks:
        rank.aborted.set()
