"""An engine that is told to end: out of the refit at once, out of the Service, and gone when its requests are answered."""

import asyncio

import pytest

from rolloutfleet_worker import draining
from rolloutfleet_worker.draining import drain
from rolloutfleet_worker.fence import Door


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(draining, "LOOK_SECONDS", 0.01)


class Requests:
    """Requests in flight, as vLLM's server counts them."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.looked = asyncio.Event()

    async def count_serving(self, deadline_seconds: float) -> int:
        self.looked.set()
        return self.count


def begin(pod, requests: Requests, seconds: float = 30.0) -> "asyncio.Task[None]":
    return asyncio.create_task(drain(pod.pod, requests, asyncio.get_running_loop().create_future(), seconds))


async def report(pod):
    headers = {"Authorization": "Bearer token"}
    async with pod.client.get("/rolloutfleet/v1/worker", headers=headers) as response:
        return await response.json()


async def test_it_is_not_ready_any_more_and_serves_what_has_begun_and_what_still_comes(pod):
    await pod.call("admit", version=0)
    requests = Requests(2)
    ending = begin(pod, requests)
    await requests.looked.wait()
    assert await pod.ready() == (False, "Leaving: the pod has been told to end")
    assert pod.engine.door is Door.OPEN
    assert (await report(pod))["leaving"]
    requests.looked.clear()
    await requests.looked.wait()
    assert not ending.done()
    requests.count = 0
    await asyncio.wait_for(ending, 5)


@pytest.mark.parametrize("staged", [True, False])
async def test_a_transfer_under_way_ends_at_once_from_inside_and_says_why(pod, staged):
    if staged:
        await pod.joined()
    else:
        await pod.paused_and_joined()
    for rank in pod.ranks:
        rank.blocks = True
    receiving = asyncio.create_task(pod.stage() if staged else pod.receive())
    for rank in pod.ranks:
        await asyncio.to_thread(rank.entered.wait, 5)
    await asyncio.wait_for(begin(pod, Requests()), 5)
    status, problem = await receiving
    # Told as its own leaving, though its ranks were cut off as those of the others are: nobody else is to be looked for.
    assert (status, problem["code"], problem["member"]) == (409, "MemberAbsent", "f-0-0-0")
    assert (await report(pod))["state"] == ("Serving" if staged else "Dirty")
    assert not pod.killed


async def test_a_version_that_is_here_whole_is_committed_and_resumed_first(pod):
    await pod.paused_and_joined()
    assert (await pod.receive())[0] == 200
    ending = begin(pod, Requests())
    await asyncio.sleep(0.05)
    assert not ending.done()
    assert (await pod.call("commit", version=1, cache="Reset"))[0] == 200
    assert not ending.done()
    assert (await pod.call("resume"))[0] == 200
    await asyncio.wait_for(ending, 5)
    assert ((await report(pod))["version"], pod.engine.paused) == (1, False)


async def test_a_version_that_is_given_up_lets_it_end_too(pod):
    await pod.joined()
    assert (await pod.stage())[0] == 200
    ending = begin(pod, Requests())
    await asyncio.sleep(0.05)
    assert not ending.done()
    await pod.call("abort", reason="the group forms again without this engine")
    await asyncio.wait_for(ending, 5)


@pytest.mark.parametrize("verb", ["join", "prepare", "receive"])
async def test_it_takes_part_in_nothing_new(pod, verb):
    await pod.paused_and_joined()
    await pod.pod.leave("the pod has been told to end")
    bodies = {
        "join": {
            "transport": "Layout",
            "wire": "Gloo",
            "rendezvous": {"host": "127.0.0.1", "port": 1},
            "trainerRanks": 2,
            "rankOffset": 3,
            "worldSize": 5,
            "deadlineSeconds": 5,
        },
        "prepare": {"manifestDigest": "m", "layouts": [], "staged": False, "deadlineSeconds": 5},
        "receive": {"version": 1, "manifestDigest": "m", "deadlineSeconds": 5, "holdSeconds": 5},
    }
    status, problem = await pod.call(verb, **bodies[verb])
    assert (status, problem["code"]) == (409, "WrongState")
    assert "this pod is about to end: the pod has been told to end" in problem["message"]


async def test_requests_that_outlast_the_time_are_not_waited_for(pod):
    await pod.call("admit", version=0)
    await asyncio.wait_for(begin(pod, Requests(1), seconds=0.05), 5)


async def test_without_time_it_leaves_and_waits_for_nothing(pod):
    await pod.call("admit", version=0)
    requests = Requests(1)
    await asyncio.wait_for(begin(pod, requests, seconds=-10), 5)
    assert (await pod.ready())[0] is False
    assert not requests.looked.is_set()


async def test_nothing_is_waited_for_when_vllm_has_ended(pod):
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(1)
    await asyncio.wait_for(drain(pod.pod, Requests(1), ended, 30), 5)
