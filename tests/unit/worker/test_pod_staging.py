"""A version that arrives beside the live weights of a pod, and how it is swapped in or forgotten."""

import asyncio

import pytest

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet_worker.fence import Door
from rolloutfleet_worker.podbase import Swapped
from rolloutfleet_worker.rank.link import RankError

COMMITTED = {"version": 1, "cacheReset": True, "state": "Serving", "pauseSeconds": None}


async def test_a_staged_refit_is_swapped_in_while_the_engine_serves(pod):
    await pod.joined()
    status, received = await pod.stage()
    assert (status, received["liveDigests"]) == (200, ["live-0", "live-1"])
    report = pod.pod.report()
    assert (report.state, report.version, report.version_in_flight, report.staged) == ("Serving", 0, 1, True)
    assert (pod.engine.door, pod.engine.paused) == (Door.OPEN, False)
    status, committed = await pod.call("commit", version=1, cache="Reset")
    assert committed == {"version": 1, "cacheReset": True, "state": "Serving", "pauseSeconds": 0.008}
    assert pod.engine.swaps == [(1, True, True)]
    assert pod.engine.resets == 0
    assert (pod.engine.door, pod.engine.version) == (Door.OPEN, 1)
    assert await pod.call("commit", version=1, cache="Reset") == (200, COMMITTED)
    assert len(pod.engine.swaps) == 1


async def test_a_staged_refit_of_a_paused_engine_leaves_it_paused_for_the_resume(pod):
    await pod.joined()
    await pod.stage()
    await pod.call("pause", mode="Wait", deadlineSeconds=30)
    _, committed = await pod.call("commit", version=1, cache="Keep")
    assert committed == {"version": 1, "cacheReset": None, "state": "Paused", "pauseSeconds": None}
    assert pod.engine.swaps == [(1, False, False)]
    assert (await pod.call("resume"))[1]["state"] == "Serving"


async def test_a_staged_transfer_that_fails_leaves_the_engine_serving_as_it_was(pod):
    await pod.joined()
    pod.ranks[1].failure = RankError("rank 1: digest mismatch in w", touched=True)
    status, problem = await pod.stage()
    assert (status, problem["code"]) == (500, "TransferFailed")
    assert await pod.ready() == (True, "")
    assert pod.engine.door is Door.OPEN
    status, problem = await pod.call("commit", version=1, cache="Reset")
    assert (status, problem["code"]) == (409, "StaleVersion")


@pytest.mark.scenario("F60")
async def test_an_abort_while_a_version_arrives_beside_the_weights_changes_nothing_for_those_who_generate(pod):
    await pod.joined()
    for rank in pod.ranks:
        rank.aborted.clear()
        rank.blocks = True
    transfer = asyncio.create_task(pod.stage(deadline=60))
    for rank in pod.ranks:
        await asyncio.to_thread(rank.entered.wait, 10)
    status, report = await pod.call("abort", reason="a peer died")
    assert (status, report["state"], report["staged"]) == (200, "Serving", False)
    assert (await transfer)[0] == 500
    assert await pod.ready() == (True, "")


async def test_a_staged_version_that_the_sync_job_forgot_is_forgotten_here_too(pod):
    await pod.joined()
    await pod.stage(deadline=0.1, hold=0.1)
    aborted = [asyncio.to_thread(rank.aborted.wait, 10) for rank in pod.ranks]
    assert all(await asyncio.gather(*aborted))
    await pod.pod._rescue
    assert (pod.pod.fence.state, pod.pod.fence.staged) == ("Serving", False)


async def test_a_swap_that_fails_half_way_fences_the_pod(pod):
    await pod.joined()
    await pod.stage()
    pod.engine.swap_answer = ProblemError(ProblemCode.ENGINE_FAILED, "vLLM answered swap with 500")
    assert (await pod.call("commit", version=1, cache="Reset"))[0] == 500
    assert (await pod.ready())[1].startswith("Dirty: the swap to version 1 ended half way")
    assert pod.engine.door is Door.CLOSED


async def test_a_swap_whose_cache_was_not_reset_fences_the_pod(pod):
    await pod.joined()
    await pod.stage()
    pod.engine.swap_answer = Swapped(cache_reset=False, pause_seconds=0.1)
    _, committed = await pod.call("commit", version=1, cache="Reset")
    assert (committed["cacheReset"], committed["state"]) == (False, "Dirty")
    assert (await pod.ready())[1].startswith("Dirty: the prefix cache could not be reset for version 1")


async def test_a_swap_that_does_not_end_in_time_gets_the_engine_killed(pod):
    await pod.joined()
    await pod.stage()
    pod.engine.swap_answer = ProblemError(ProblemCode.DEADLINE_EXCEEDED, "vLLM did not finish swap within 30 s")
    assert (await pod.call("commit", version=1, cache="Reset"))[0] == 504
    assert pod.killed
