"""Aborts that come while something else is under way: they go first, and never cost a healthy engine its life."""

import asyncio
import threading

import pytest

from fakes.pod import JOIN, RENDEZVOUS
from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet_worker import podbase


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podbase, "ABORT_SECONDS", 0.5)


class Draining:
    """A pause that waits for requests, until the engine is resumed or nobody wants it any more."""

    def __init__(self, pod) -> None:
        self.entered = asyncio.Event()
        self.resumed = asyncio.Event()
        self.calls = 0
        self._engine = pod.engine
        self._resume = pod.engine.resume
        pod.engine.pause, pod.engine.resume = self.pause, self.resume

    async def resume(self, deadline_seconds: float) -> None:
        await self._resume(deadline_seconds)
        self.resumed.set()

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> None:
        self.calls += 1
        self._engine.paused = True
        self.entered.set()
        await asyncio.sleep(deadline_seconds)
        raise ProblemError(ProblemCode.DEADLINE_EXCEEDED, "vLLM did not finish pause")


@pytest.mark.scenario("F66")
async def test_an_abort_ends_a_pause_that_still_waits_for_requests(pod):
    await pod.call("admit", version=0)
    draining = Draining(pod)
    pausing = asyncio.create_task(pod.call("pause", mode="Wait", deadlineSeconds=60))
    await draining.entered.wait()
    status, report = await pod.call("abort", reason="the trainer is gone")
    assert (status, report["state"]) == (200, "Serving")
    status, problem = await pausing
    assert (status, problem["code"]) == (500, "TransferFailed")
    assert "ended by an abort: the trainer is gone" in problem["message"]
    assert not pod.killed
    assert not pod.engine.paused
    assert await pod.ready() == (True, "")


async def test_a_pause_that_waited_for_its_turn_behind_another_is_ended_by_the_abort_too(pod):
    await pod.call("admit", version=0)
    draining = Draining(pod)
    pausing = [asyncio.create_task(pod.call("pause", mode="Wait", deadlineSeconds=60)) for _ in range(2)]
    await draining.entered.wait()
    assert (await pod.call("abort", reason="a peer died"))[0] == 200
    assert [(await call)[0] for call in pausing] == [500, 500]
    assert draining.calls == 1
    assert not pod.killed
    assert not pod.engine.paused


async def test_a_pause_past_its_deadline_gives_the_engines_own_reason_and_is_ended_without_a_kill(pod):
    await pod.call("admit", version=0)
    draining = Draining(pod)
    status, problem = await pod.call("pause", mode="Wait", deadlineSeconds=0.05)
    assert (status, problem["message"]) == (504, "vLLM did not finish pause")
    await asyncio.wait_for(draining.resumed.wait(), 10)
    assert not pod.killed


async def test_a_pause_after_an_abort_is_an_ordinary_one(pod):
    await pod.call("admit", version=0)
    pause = pod.engine.pause
    draining = Draining(pod)
    pausing = asyncio.create_task(pod.call("pause", mode="Wait", deadlineSeconds=60))
    await draining.entered.wait()
    await pod.call("abort", reason="a peer died")
    await pausing
    pod.engine.pause = pause
    status, report = await pod.call("pause", mode="Wait", deadlineSeconds=60, epoch=2)
    assert (status, report["state"]) == (200, "Paused")


async def test_sleep_beside_an_abort_waits_until_lending_has_ended(pod):
    """The sync job ends loans and says sleep in one breath; the abort still waits for its ranks then."""
    await pod.call("admit", version=0)
    await pod.call("lend", version=0, wire="Gloo", deadlineSeconds=30)
    began, slow = asyncio.Event(), asyncio.Event()
    tell = pod.pod._ranks.abort_all

    async def abort_all():
        began.set()
        await slow.wait()
        await tell()

    pod.pod._ranks.abort_all = abort_all
    abort = asyncio.create_task(pod.call("abort", reason="the fleet sleeps"))
    await began.wait()
    sleep = asyncio.create_task(pod.call("sleep", level=1, deadlineSeconds=5))
    done, _ = await asyncio.wait({sleep}, timeout=0.1)
    assert not done
    slow.set()
    assert (await abort)[0] == 200
    status, report = await sleep
    assert (status, report["state"]) == (200, "Asleep")


async def test_a_lender_is_not_staged_to_and_a_staged_version_is_not_lent_beside(pod):
    await pod.joined()
    await pod.call("lend", version=0, wire="Gloo", deadlineSeconds=30)
    status, problem = await pod.stage()
    assert (status, problem["code"]) == (409, "WrongState")
    assert "receive beside the live weights: this worker lends its weights to a peer" in problem["message"]
    assert pod.ordered("receive") == []
    await pod.call("abort", reason="x")
    assert (await pod.call("join", **JOIN))[0] == 200
    assert (await pod.stage())[0] == 200
    status, problem = await pod.call("lend", version=0, wire="Gloo", deadlineSeconds=30)
    assert (status, problem["code"]) == (409, "WrongState")
    assert "lend: version 1 lies staged beside the live weights" in problem["message"]
    assert (await pod.call("commit", version=1, cache="Reset"))[0] == 200


@pytest.mark.parametrize("verb", ["lend", "borrow"])
async def test_an_abort_ends_the_digest_of_all_weights_that_lending_begins_with(pod, verb):
    await pod.call("admit", version=0)
    for rank in pod.ranks:
        rank.digesting = threading.Event()
    body = {"version": 0, "wire": "Gloo", "deadlineSeconds": 60}
    if verb == "borrow":
        body |= {"version": 1, "rendezvous": RENDEZVOUS, "shape": "s", "holdSeconds": 5}
    call = asyncio.create_task(pod.call(verb, **body))
    for rank in pod.ranks:
        assert await asyncio.to_thread(rank.digesting.wait, 10)
    status, report = await pod.call("abort", reason="a refit begins")
    assert (status, report["state"]) == (200, "Serving")
    status, problem = await call
    assert (status, problem["code"]) == (500, "TransferFailed")
    assert "not wanted any more" in problem["message"]
    assert not pod.killed
    assert not pod.pod.fence.lending
    assert await pod.ready() == (True, "")
