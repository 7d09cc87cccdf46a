"""A pod whose weights sleep, and pods that lend their weights to peers or borrow them."""

import pytest

from fakes.pod import JOIN, RENDEZVOUS
from rolloutfleet_worker.fence import Door

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [4]}]}


async def test_sleep_closes_the_door_and_frees_the_second_buffer_first(pod):
    await pod.call("admit", version=0)
    status, report = await pod.call("sleep", level=1, deadlineSeconds=5)
    assert (status, report["state"], report["sleepLevel"]) == (200, "Asleep", 1)
    assert report["asleep"] == ["kv_cache", "weights"]
    assert [rank.orders for rank in pod.ranks] == [[("free", {})]] * 2
    await pod.call("sleep", level=1, deadlineSeconds=5)
    assert pod.engine.slept == ["sleep 1 behind a door Closed"]
    assert (await pod.ready())[1].startswith("Asleep: level 1")
    status, report = await pod.call("wake", deadlineSeconds=5)
    assert (report["state"], pod.engine.slept[1:]) == ("Serving", ["wake kv_cache weights"])
    assert [rank.orders for rank in pod.ranks] == [[("free", {}), ("unmap", {})]] * 2
    await pod.call("wake", deadlineSeconds=5)
    assert len(pod.engine.slept) == 2
    assert pod.engine.door is Door.OPEN


async def test_an_engine_that_cannot_sleep_says_why_and_serves_on(pod):
    await pod.call("admit", version=0)
    pod.engine.sleep_refusal = "this engine was started without --enable-sleep-mode"
    status, problem = await pod.call("sleep", level=2, deadlineSeconds=5)
    assert (status, problem["code"], problem["message"]) == (409, "WrongState", pod.engine.sleep_refusal)
    assert await pod.ready() == (True, "")
    assert pod.engine.door is Door.OPEN


@pytest.mark.scenario("F49")
async def test_a_refit_of_weights_that_are_asleep_is_refused_at_the_first_step(pod):
    await pod.call("admit", version=0)
    await pod.call("sleep", level=1, deadlineSeconds=5)
    for verb, body in (("check", {"manifest": MANIFEST, "deadlineSeconds": 5}), ("join", JOIN)):
        status, problem = await pod.call(verb, **body)
        assert (status, problem["code"]) == (409, "WrongState")
        assert "the weights are asleep at level 1; wake tag weights first" in problem["message"]
    assert pod.ordered("join") == []


@pytest.mark.scenario("F50")
async def test_level_two_weights_are_woken_refitted_and_only_then_served(pod):
    await pod.call("admit", version=0)
    await pod.call("sleep", level=2, deadlineSeconds=5)
    await pod.call("wake", tags=["weights"], deadlineSeconds=5)
    await pod.call("join", **JOIN)
    await pod.call("pause", mode="Keep", deadlineSeconds=30)
    assert not pod.engine.paused
    await pod.receive()
    assert (await pod.call("commit", version=1, cache="Reset"))[1]["state"] == "Asleep"
    assert (await pod.call("resume"))[1]["state"] == "Asleep"
    assert pod.engine.door is Door.CLOSED
    _, report = await pod.call("wake", tags=["kv_cache"], deadlineSeconds=5)
    assert (report["state"], report["version"]) == ("Serving", 1)
    assert (pod.engine.door, pod.engine.version) == (Door.OPEN, 1)


async def test_a_lender_serves_while_it_lends_and_may_be_refitted_again_afterwards(pod):
    await pod.joined()
    status, report = await pod.call("lend", version=0, wire="Gloo", deadlineSeconds=30)
    assert (status, report["rendezvous"]) == (200, {"host": "127.0.0.1", "port": 7})
    assert report["liveDigests"] == ["live-0", "live-1"]
    assert await pod.ready() == (True, "")
    await pod.call("pause", mode="Keep", deadlineSeconds=30)
    status, problem = await pod.receive()
    assert (status, problem["code"]) == (409, "WrongState")
    assert "lends its weights to a peer" in problem["message"]
    for rank in pod.ranks:
        rank.lent.set()
    await pod.pod._lending
    assert (await pod.receive())[0] == 200


async def test_a_borrower_of_another_shape_is_refused_before_anything_moves(pod):
    borrow = {"version": 1, "wire": "Gloo", "rendezvous": RENDEZVOUS, "deadlineSeconds": 5, "holdSeconds": 5}
    status, problem = await pod.call("borrow", shape="another", **borrow)
    assert (status, problem["code"]) == (422, "ManifestMismatch")
    assert "names, types or shapes of live tensors differ" in problem["message"]
    assert pod.ordered("borrow") == []


async def test_a_borrower_is_paused_fenced_and_holds_the_version_once_it_is_committed(pod):
    _, lent = await pod.call("lend", version=0, wire="Gloo", deadlineSeconds=30)
    for rank in pod.ranks:
        rank.lent.set()
    await pod.pod._lending
    await pod.call("admit", version=5)
    borrow = {"version": 5, "wire": "Gloo", "rendezvous": RENDEZVOUS, "deadlineSeconds": 5, "holdSeconds": 5}
    status, received = await pod.call("borrow", shape=lent["shape"], **borrow)
    assert (status, received["liveDigests"]) == (200, ["live-0", "live-1"])
    assert (pod.engine.paused, pod.pod.fence.state) == (True, "Received")
    assert (await pod.call("commit", version=5, cache="Reset"))[0] == 200
    assert (await pod.call("resume"))[1]["version"] == 5
    assert await pod.ready() == (True, "")
