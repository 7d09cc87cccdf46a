"""A whole engine pod without vLLM: real control surface, fence and rank links over rank operations that only pretend."""

import asyncio
import threading

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet_worker.control import make_application
from rolloutfleet_worker.fence import Door, Fence, Identity
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.rank.link import RankError, RankLink
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.reports import merge_checks

MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [4]}]}
RENDEZVOUS = {"host": "127.0.0.1", "port": 1}


class RankDouble:
    """Rank operations that hold no weights; ``receive`` blocks until aborted where told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failure: Exception | None = None
        self.blocks = False
        self.entered = threading.Event()
        self.aborted = threading.Event()
        self.joined_as: int | None = None

    def describe(self):
        return {"vllm_version": "0.32.0", "nccl_version": "", "device": "cpu"}

    def check(self, body):
        return {"missing": ["model.norm.weight"], "extra": [], "misshapen": [], "consumed": {}}

    def join(self, body, cancelled):
        self.joined_as = body["rank"]
        return {"rank": body["rank"]}

    def receive(self, body, cancelled):
        if self.blocks:
            self.entered.set()
            self.aborted.wait(20)
            raise RankError(f"rank {self.rank}: aborted", touched=True)
        if self.failure:
            raise self.failure
        return {
            "tensors": 1,
            "nbytes": 16,
            "received_digest": "aa",
            "live_digest": f"live-{self.rank}",
            "receive_seconds": 0.1,
            "load_seconds": 0.2,
        }

    def abort(self):
        self.aborted.set()


class EngineDouble:
    """Records what the pod asks of vLLM."""

    def __init__(self) -> None:
        self.paused = False
        self.cache_resets: bool | Exception = True
        self.resets = 0
        self.door = Door.CLOSED
        self.version = 0

    async def pause(self, mode: PauseMode, deadline_seconds: float):
        self.paused = True

    async def resume(self, deadline_seconds: float):
        self.paused = False

    async def reset_cache(self, deadline_seconds: float):
        self.resets += 1
        if isinstance(self.cache_resets, Exception):
            raise self.cache_resets
        return self.cache_resets

    async def set_door(self, door, *, version, reason, deadline_seconds):
        self.door, self.version = door, version


class Pod:
    def __init__(
        self, client: TestClient, ranks: list[RankDouble], engine: EngineDouble, pod: EnginePod, killed: list
    ) -> None:
        self.client, self.ranks, self.engine, self.pod, self.killed = client, ranks, engine, pod, killed

    async def call(self, verb: str, *, token: str = "token", **body):
        body = {"fleetUid": "fleet-uid", "podUid": "pod-uid", "instance": "one", "epoch": 1, **body}
        async with self.client.post(
            f"/rolloutfleet/v1/worker/{verb}", json=body, headers={"Authorization": f"Bearer {token}"}
        ) as response:
            return response.status, await response.json()

    async def ready(self):
        async with self.client.get("/healthz/ready") as response:
            return response.status == 200, (await response.json())["reason"]

    async def paused_and_joined(self):
        await self.call("admit", version=0)
        await self.call("join", transport="Gloo", rendezvous=RENDEZVOUS, rankOffset=3, worldSize=5, deadlineSeconds=5)
        await self.call("pause", mode="Keep", deadlineSeconds=30)

    async def receive(self, deadline: float = 10):
        return await self.call("receive", version=1, manifest=MANIFEST, deadlineSeconds=deadline, holdSeconds=30)


@pytest.fixture
async def pod(tmp_path):
    doubles = [RankDouble(0), RankDouble(1)]
    engine = EngineDouble()
    ranks = Ranks(2, lambda rank: None)
    await ranks.listen(tmp_path / "ranks.sock")
    links = [RankLink(str(tmp_path / "ranks.sock"), double) for double in doubles]
    for link in links:
        await asyncio.to_thread(link.start)
    await ranks.complete.wait()
    identity = Identity(fleet="f", fleet_uid="fleet-uid", pod_name="f-0-0-0", pod_uid="pod-uid", instance="one")
    killed: list[bool] = []
    engine_pod = EnginePod(Fence(identity=identity), 0, ranks, 2, engine, lambda: killed.append(True), {})
    await engine_pod.started()
    client = TestClient(TestServer(make_application(engine_pod, "token", lambda: "")))
    await client.start_server()
    yield Pod(client, doubles, engine, engine_pod, killed)
    await client.close()
    for link in links:
        link.stop()
    await ranks.close()


@pytest.mark.scenario("F13")
async def test_every_local_rank_joins_at_the_offset_plus_its_own_rank(pod):
    status, answer = await pod.call(
        "join", transport="Gloo", rendezvous=RENDEZVOUS, rankOffset=3, worldSize=5, deadlineSeconds=5
    )
    assert (status, answer["ranks"]) == (200, [3, 4])
    assert [rank.joined_as for rank in pod.ranks] == [3, 4]


async def test_a_refit_goes_through_pause_receive_commit_and_resume(pod):
    await pod.paused_and_joined()
    assert pod.engine.paused
    status, received = await pod.receive()
    assert (status, received["receivedDigest"], received["liveDigests"]) == (200, "aa", ["live-0", "live-1"])
    status, committed = await pod.call("commit", version=1, cache="Reset")
    assert (status, committed) == (200, {"version": 1, "cacheReset": True})
    status, report = await pod.call("resume")
    assert (status, report["state"], report["version"]) == (200, "Serving", 1)
    assert not pod.engine.paused
    assert (pod.engine.door, pod.engine.version) == (Door.OPEN, 1)
    assert await pod.ready() == (True, "")


async def test_a_pause_within_its_deadline_stays_ready(pod):
    await pod.paused_and_joined()
    assert await pod.ready() == (True, "")


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
    assert (status, problem["code"]) == (500, "TransferFailed")
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
        assert await pod.call("commit", version=1, cache="Reset") == (200, {"version": 1, "cacheReset": True})
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


async def test_a_container_that_started_anew_does_not_obey_calls_for_the_old_one(pod):
    status, problem = await pod.call("abort", reason="x", instance="older")
    assert (status, problem["code"]) == (409, "WrongPod")


async def test_a_check_reports_faults_and_changes_nothing(pod):
    status, report = await pod.call("check", manifest=MANIFEST, deadlineSeconds=5)
    assert (status, report["faults"]["missing"]) == (200, ["model.norm.weight"])
    assert pod.pod.fence.state == "Serving"


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_wrong_token_is_refused_on_every_control_route(pod, token):
    for verb in ("admit", "check", "join", "pause", "receive", "commit", "resume", "abort", "reset-cache"):
        status, problem = await pod.call(verb, token=token)
        assert (status, problem["code"]) == (401, "Unauthorized")


async def test_a_malformed_call_names_the_field(pod):
    status, problem = await pod.call("receive", version=0, manifest=MANIFEST, deadlineSeconds=1, holdSeconds=1)
    assert status == 422
    assert "version: Input should be greater than or equal to 1" in problem["message"]


def test_a_tensor_used_only_in_part_by_all_ranks_together_has_the_wrong_shape():
    manifest = Manifest.model_validate(
        {"tensors": [{"name": name, "dtype": "float32", "shape": [8]} for name in ("sharded", "too-long", "tied")]}
    )
    answers = [
        {"missing": [], "extra": [], "misshapen": [], "consumed": {"sharded": 4, "too-long": 3, "tied": 0}}
        for _ in range(2)
    ]
    report = merge_checks(manifest, answers)
    assert report.faults.misshapen == ("tensor too-long has shape [8], the model takes only 6 of its 8 elements",)
    assert report.ignored == ("tied",)


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
