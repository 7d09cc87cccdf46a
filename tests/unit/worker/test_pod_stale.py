"""A pod that serves an older version for a while, and takes the newer one from a peer meanwhile."""

import asyncio

import pytest

from fakes.pod import RENDEZVOUS
from rolloutfleet_worker.fence import Door
from rolloutfleet_worker.rank.link import RankError

LONG = 60.0


async def lender_shape(pod) -> str:
    """What a lender of this pod's own shape would tell."""
    _, lent = await pod.call("lend", version=pod.pod.fence.version, wire="Gloo", deadlineSeconds=5)
    await pod.call("let-go")
    return str(lent["shape"])


async def borrow(pod, **fields):
    body = {"version": 1, "wire": "Gloo", "rendezvous": RENDEZVOUS, "deadlineSeconds": 5, "holdSeconds": 5}
    return await pod.call("borrow", **{**body, "shape": await lender_shape(pod), **fields})


async def test_an_engine_that_may_be_stale_serves_what_it_holds_and_says_for_how_long(pod):
    await pod.call("admit", version=0)
    _, report = await pod.call("admit", version=1, staleSeconds=LONG)
    assert LONG - 5 < report["staleSeconds"] <= LONG
    assert await pod.ready() == (True, "")
    assert (pod.engine.door, pod.engine.version) == (Door.OPEN, 0)


async def test_an_engine_that_has_never_served_is_not_made_to_by_a_permission(pod):
    _, report = await pod.call("admit", version=1, staleSeconds=LONG)
    assert report["staleSeconds"] is None
    ready, reason = await pod.ready()
    assert not ready
    assert reason.startswith("Stale: holds version 0, the fleet has committed version 1")


async def test_the_door_closes_by_itself_when_the_time_is_over(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=1, staleSeconds=0.05)
    closed = asyncio.Event()
    publish = pod.engine.set_door

    async def watch(door, **fields):
        await publish(door, **fields)
        closed.set()

    pod.engine.set_door = watch
    async with asyncio.timeout(5):
        await closed.wait()
    assert pod.engine.door is Door.CLOSED
    assert pod.pod.report().stale_seconds == 0
    assert "maxStaleSeconds" in (await pod.ready())[1]
    _, report = await pod.call("admit", version=1, staleSeconds=LONG)
    assert report["staleSeconds"] == 0, "a time that is over does not begin again"


async def test_an_end_that_was_told_is_never_put_off_and_is_taken_back_with_the_version(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=0, staleSeconds=5)
    _, report = await pod.call("admit", version=1, staleSeconds=LONG)
    assert report["staleSeconds"] <= 5
    _, report = await pod.call("admit", version=1)
    assert report["staleSeconds"] is None
    assert pod.engine.door is Door.CLOSED


async def test_what_was_announced_and_did_not_come_is_forgotten(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=0, staleSeconds=LONG)
    _, report = await pod.call("admit", version=0)
    assert (report["staleSeconds"], pod.engine.door) == (None, Door.OPEN)
    _, report = await pod.call("admit", version=1, staleSeconds=2 * LONG)
    assert report["staleSeconds"] > LONG, "the next announcement begins anew"


async def test_a_peers_version_comes_beside_the_weights_that_serve_and_is_swapped_in(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=1, staleSeconds=LONG)
    status, received = await borrow(pod, staged=True)
    assert (status, received["liveDigests"]) == (200, ["live-0", "live-1"])
    report = pod.pod.report()
    assert (report.state, report.version, report.version_in_flight, report.staged) == ("Serving", 0, 1, True)
    assert (pod.engine.paused, pod.engine.door) == (False, Door.OPEN)
    assert [body["staged"] for body in pod.ordered("borrow")] == [True, True]
    _, committed = await pod.call("commit", version=1, cache="Reset")
    assert (committed["state"], pod.engine.swaps) == ("Serving", [(1, True, True)])
    report = pod.pod.report()
    assert (report.version, report.stale_seconds, report.staged) == (1, None, False)


async def test_without_room_nothing_is_taken_and_nothing_pauses(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=1, staleSeconds=LONG)
    pod.ranks[1].room_bytes = 99
    status, problem = await borrow(pod, staged=True)
    assert (status, problem["code"]) == (409, "NoRoom")
    assert "local rank 1 has no room" in problem["message"]
    assert (pod.ordered("borrow"), pod.engine.paused, pod.engine.door) == ([], False, Door.OPEN)


async def test_a_peer_that_is_lost_while_its_weights_come_beside_leaves_the_engine_serving(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=1, staleSeconds=LONG)
    pod.ranks[0].failure = RankError("local rank 0 borrowed in vain: connection reset")
    status, problem = await borrow(pod, staged=True)
    assert (status, problem["code"]) == (500, "TransferFailed")
    report = pod.pod.report()
    assert (report.state, report.version, report.staged, pod.engine.door) == ("Serving", 0, False, Door.OPEN)


@pytest.mark.parametrize("mode", ["Keep", "Wait", "Abort"])
async def test_in_place_a_serving_engine_pauses_as_the_fleet_says_and_keeps_requests_waiting(pod, mode):
    await pod.call("admit", version=0)
    await pod.call("admit", version=1, staleSeconds=LONG)
    modes = []
    pause = pod.engine.pause

    async def noted(given, deadline_seconds):
        modes.append(given)
        await pause(given, deadline_seconds)

    pod.engine.pause = noted
    status, _ = await borrow(pod, pause=mode)
    assert (status, modes) == (200, [mode])
    assert pod.engine.door is Door.HELD, "requests wait, they are not refused"
    ready, reason = await pod.ready()
    assert (ready, reason) == (False, "Stale: takes version 1 over from a peer"), (
        "others are better places for new ones"
    )
    await pod.call("commit", version=1, cache="Reset")
    await pod.call("resume")
    assert (await pod.ready(), pod.engine.door, pod.engine.version) == ((True, ""), Door.OPEN, 1)


async def test_a_time_that_ends_while_the_newer_version_comes_in_place_refuses_nobody(pod):
    await pod.call("admit", version=0)
    await pod.call("admit", version=1, staleSeconds=LONG)
    assert (await borrow(pod))[0] == 200
    pod.pod.fence = pod.pod.fence.stale_ends()
    assert pod.engine.door is Door.HELD
    await pod.call("commit", version=1, cache="Reset")
    await pod.call("resume")
    assert await pod.ready() == (True, "")
