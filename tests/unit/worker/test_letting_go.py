"""A lending that is ended from outside, and a pause that does not shorten what a staged version is kept for."""

import asyncio

from rolloutfleet.contract.worker import WorkerState


async def lending(pod) -> None:
    await pod.joined()
    status, _ = await pod.call("lend", version=0, wire="Gloo", deadlineSeconds=60)
    assert status == 200
    for rank in pod.ranks:
        await asyncio.to_thread(rank.entered.wait, 5)
    assert pod.pod.fence.lending


async def test_a_lender_that_is_told_to_let_go_does_not_lend_when_it_answers_and_stays_in_its_group(pod):
    await lending(pod)
    status, report = await pod.call("let-go")
    assert (status, report["state"]) == (200, "Serving")
    assert not pod.pod.fence.lending
    assert pod.pod.fence.joined
    assert not any(rank.aborted.is_set() for rank in pod.ranks)


async def test_letting_go_of_nothing_changes_nothing(pod):
    await pod.joined()
    before = pod.pod.fence
    assert (await pod.call("let-go"))[0] == 200
    assert pod.pod.fence == before


async def test_a_lender_that_holds_on_says_so(pod, monkeypatch):
    monkeypatch.setattr("rolloutfleet_worker.peerverbs.LETTING_GO_SECONDS", 0.05)
    for rank in pod.ranks:
        rank.let_go = lambda: None
    await lending(pod)
    status, problem = await pod.call("let-go")
    assert (status, problem["code"]) == (504, "DeadlineExceeded")
    assert "the lending did not end within 0.05 s after it was told to" in problem["message"]
    assert pod.pod.fence.lending


async def test_an_old_wish_to_let_go_ends_no_lending(pod):
    await lending(pod)
    status, problem = await pod.call("let-go", epoch=0)
    assert (status, problem["code"]) == (409, "StaleEpoch")
    assert pod.pod.fence.lending


async def test_a_pause_does_not_shorten_the_time_that_a_staged_version_is_kept_for(pod):
    await pod.joined()
    assert (await pod.stage(deadline=5, hold=100))[0] == 200
    kept = pod.pod._hold_end.when()
    status, report = await pod.call("pause", mode="Wait", deadlineSeconds=1)
    assert (status, report["state"], report["staged"]) == (200, WorkerState.PAUSED, True)
    assert pod.pod._hold_end.when() == kept
