"""What a pod answers to calls and probes: who may ask, what a report adds up, and when it says that it is alive."""

import pytest
from aiohttp.test_utils import TestClient, TestServer

from fakes.pod import LAYOUT, EngineDouble
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.worker import Locality
from rolloutfleet_worker.control import make_application
from rolloutfleet_worker.fence import Fence, Identity
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.reports import merge_checks

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [4]}]}


async def test_a_container_that_started_anew_does_not_obey_calls_for_the_old_one(pod):
    status, problem = await pod.call("abort", reason="x", instance="older")
    assert (status, problem["code"]) == (409, "WrongPod")


async def test_a_check_reports_faults_and_changes_nothing(pod):
    status, report = await pod.call("check", manifest=MANIFEST, deadlineSeconds=5)
    assert (status, report["faults"]["missing"]) == (200, ["model.norm.weight"])
    assert pod.pod.fence.state == "Serving"


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_wrong_token_is_refused_on_every_control_route(pod, token):
    for verb in (
        *("admit", "check", "join", "prepare", "pause", "receive", "commit", "resume", "abort", "reset-cache"),
        *("sleep", "wake", "lend", "borrow"),
    ):
        status, problem = await pod.call(verb, token=token)
        assert (status, problem["code"]) == (401, "Unauthorized")


async def test_a_malformed_call_names_the_field(pod):
    status, problem = await pod.call("receive", version=0, manifestDigest="m", deadlineSeconds=1, holdSeconds=1)
    assert status == 422
    assert "version: Input should be greater than or equal to 1" in problem["message"]


def test_a_tensor_used_only_in_part_by_all_ranks_together_has_the_wrong_shape():
    manifest = Manifest.model_validate(
        {"tensors": [{"name": name, "dtype": "float32", "shape": [8]} for name in ("sharded", "too-long", "tied")]}
    )
    answers = [
        {
            "missing": [],
            "extra": [],
            "misshapen": [],
            "consumed": {"sharded": 4, "too-long": 3, "tied": 0},
            "layout": LAYOUT,
        }
        for _ in range(2)
    ]
    report = merge_checks(manifest, answers)
    assert report.faults.misshapen == ("tensor too-long has shape [8], the model takes only 6 of its 8 elements",)
    assert report.ignored == ("tied",)


async def test_preparing_tells_every_rank_the_layouts_of_all_and_adds_up_their_buffers(pod):
    await pod.joined()
    call = {"manifestDigest": "m", "layouts": ["a", "b"], "staged": True, "deadlineSeconds": 5}
    status, report = await pod.call("prepare", **call)
    assert (status, report["stagingBytes"]) == (200, 200)
    assert [body["layouts"] for body in pod.ordered("prepare")] == [["a", "b"], ["a", "b"]]
    pod.ranks[0].failure = RankError("rank 3: a second buffer needs 5 bytes, 4 are free", touched=False)
    status, problem = await pod.call("prepare", **call)
    assert (status, problem["code"]) == (500, "TransferFailed")
    assert "a second buffer needs 5 bytes, 4 are free" in problem["message"]
    assert await pod.ready() == (True, "")


async def test_a_report_adds_up_bytes_and_names_the_rank_that_was_last(pod):
    await pod.paused_and_joined()
    pod.ranks[1].seconds = 3.0
    _, received = await pod.receive()
    assert (received["nbytes"], received["slowestRank"], received["receiveSeconds"]) == (32, 1, 3.0)
    assert received["layouts"] == []


async def test_layouts_come_for_all_ranks_as_soon_as_one_has_changed(pod):
    await pod.paused_and_joined()
    pod.ranks[1].layout_changed = True
    _, received = await pod.receive()
    assert [layout["digest"] for layout in received["layouts"]] == ["layout", "layout"]


async def test_a_report_says_which_memory_the_engine_shares(pod):
    assert pod.pod.report().locality == Locality(host="h", memory="m")


async def test_the_pod_answers_only_after_all_ranks_connected(tmp_path):
    ranks = Ranks(1, lambda rank: None)
    identity = Identity(fleet="f", fleet_uid="u", pod_name="p", pod_uid="q", instance="one")
    starting = EnginePod(Fence(identity=identity), 0, ranks, 1, EngineDouble(), lambda: None, {})
    async with TestClient(TestServer(make_application(starting, "token", lambda: ""))) as client:
        for probe, expected in (("started", 503), ("ready", 503), ("live", 200)):
            async with client.get(f"/healthz/{probe}") as response:
                assert response.status == expected


@pytest.mark.scenario("F72")
async def test_a_dead_engine_fails_liveness_and_readiness_though_the_web_server_answers(tmp_path):
    ranks = Ranks(1, lambda rank: None)
    identity = Identity(fleet="f", fleet_uid="u", pod_name="p", pod_uid="q", instance="one")
    dead = EnginePod(Fence(identity=identity), 0, ranks, 1, EngineDouble(), lambda: None, {})
    async with TestClient(
        TestServer(make_application(dead, "token", lambda: "the process of local rank 0 ended"))
    ) as client:
        for probe in ("live", "ready"):
            async with client.get(f"/healthz/{probe}") as response:
                assert response.status == 503
                assert (await response.json())["reason"] == "the process of local rank 0 ended"
