"""Adapters in an engine pod: received beside a serving engine, served from their commit on, lent with the weights."""

import pytest

from fakes.pod import RENDEZVOUS, running_pod
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet_worker.fence import Door

SPEC = {"name": "style", "rank": 8, "alpha": 16.0}
HELD = {"spec": SPEC, "version": 1, "nbytes": 5, "sha256": "abc"}
COMMITTED = {"version": 1, "cacheReset": None, "state": "Serving", "pauseSeconds": 0.002}


@pytest.fixture
async def pod(tmp_path):
    async with running_pod(tmp_path) as pod:
        pod.ranks[0].adapter = HELD
        yield pod


async def test_an_adapter_is_served_from_its_commit_on_and_nothing_pauses(pod):
    await pod.joined()
    assert (await pod.stage())[0] == 200
    assert (pod.engine.adapters, pod.pod.report().adapters) == ({}, {})
    assert await pod.call("commit", version=1, cache="Reset") == (200, COMMITTED)
    assert (pod.engine.adapters, pod.pod.report().adapters) == ({"style": 1}, {"style": 1})
    assert (pod.engine.door, pod.engine.version) == (Door.OPEN, 1)
    assert (pod.engine.swaps, pod.engine.resets, pod.engine.paused) == ([], 0, False)
    fence = pod.pod.fence
    assert (fence.version, fence.staged, fence.version_in_flight, fence.joined) == (1, False, 0, True)


async def test_a_repeated_commit_loads_nothing_and_resets_nothing(pod):
    await pod.joined()
    await pod.stage()
    await pod.call("commit", version=1, cache="Reset")
    pod.engine.adapters.clear()
    status, answer = await pod.call("commit", version=1, cache="Reset")
    assert (status, answer["state"]) == (200, "Serving")
    assert (pod.engine.adapters, pod.engine.resets) == ({}, 0)


async def test_an_adapter_that_vllm_refuses_leaves_the_old_version_serving_and_may_be_tried_again(pod):
    await pod.joined()
    await pod.stage()
    pod.engine.adapter_failure = ProblemError(ProblemCode.ENGINE_FAILED, "vLLM answered serve-adapter with 500")
    status, problem = await pod.call("commit", version=1, cache="Reset")
    assert (status, problem["code"]) == (500, "EngineFailed")
    assert (pod.pod.fence.state, pod.pod.fence.version, pod.engine.door) == ("Serving", 0, Door.OPEN)
    pod.engine.adapter_failure = None
    assert await pod.call("commit", version=1, cache="Reset") == (200, COMMITTED)


async def test_an_aborted_adapter_is_never_committed(pod):
    await pod.joined()
    await pod.stage()
    await pod.call("abort", reason="the trainer is gone")
    status, problem = await pod.call("commit", version=1, cache="Reset")
    assert (status, problem["code"]) == (409, "StaleVersion")
    assert pod.engine.adapters == {}


async def test_weights_of_the_same_version_after_an_aborted_adapter_are_swapped_as_weights(pod):
    await pod.joined()
    await pod.stage()
    await pod.call("abort", reason="the trainer is gone")
    pod.ranks[0].adapter = None
    await pod.joined()
    await pod.stage()
    assert (await pod.call("commit", version=1, cache="Reset"))[0] == 200
    assert (pod.engine.adapters, pod.engine.swaps) == ({}, [(1, True, True)])


async def test_an_adapter_needs_weights_to_go_on(pod):
    pod.pod.fence = type(pod.pod.fence)(identity=pod.pod.fence.identity, await_first_refit=True).started()
    manifest = {"tensors": [{"name": "a", "dtype": "float32", "shape": [1]}]}
    status, problem = await pod.call("check", manifest=manifest, adapter=SPEC, deadlineSeconds=5)
    assert (status, problem["code"]) == (409, "WrongState")
    assert "adapter style has no base to go on" in problem["message"]


async def test_a_borrower_serves_the_lenders_adapters_and_no_others(pod):
    await pod.joined()
    await pod.stage()
    await pod.call("commit", version=1, cache="Reset")
    status, lent = await pod.call("lend", version=1, wire="Gloo", deadlineSeconds=5)
    assert status == 200
    assert [(held["spec"]["name"], held["version"]) for held in lent["adapters"]] == [("style", 1)]
    pod.ranks[0].entered.wait(5)
    pod.ranks[1].entered.wait(5)
    assert [len(body["adapters"]) for body in pod.ordered("lend")] == [1, 0]
    for rank in pod.ranks:
        rank.let_go()
    await pod.pod._lending
    other = {**HELD, "spec": {**SPEC, "name": "tone"}, "version": 2}
    body = {"rendezvous": RENDEZVOUS, "wire": "Gloo", "shape": lent["shape"], "adapters": [other]}
    status, _ = await pod.call("borrow", version=2, deadlineSeconds=5, holdSeconds=30, **body)
    assert status == 200
    assert pod.engine.adapters == {"style": 1}
    assert (await pod.call("commit", version=2, cache="Reset"))[0] == 200
    assert (pod.engine.adapters, pod.pod.report().adapters) == ({"tone": 2}, {"tone": 2})
    assert [len(body["adapters"]) for body in pod.ordered("borrow")] == [1, 0]


async def test_an_engine_that_stood_still_is_still_to_be_resumed(pod):
    await pod.joined()
    await pod.call("pause", mode="Keep", deadlineSeconds=30)
    await pod.stage()
    status, answer = await pod.call("commit", version=1, cache="Reset")
    assert (status, answer["state"]) == (200, "Paused")
    assert pod.pod._hold_end is not None
    assert (await pod.call("resume"))[1]["state"] == "Serving"
