"""A whole engine pod without vLLM: real control surface, fence and rank links over rank operations that only pretend."""

import asyncio
import threading

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Locality
from rolloutfleet_worker.control import make_application
from rolloutfleet_worker.fence import Door, Fence, Identity
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.podbase import Swapped
from rolloutfleet_worker.rank.link import RankError, RankLink
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.reports import merge_checks

LAYOUT = {"digest": "layout", "shape": "shape", "placedBytes": 12, "detouredBytes": 4, "roomBytes": 1000}
COMMITTED = {"version": 1, "cacheReset": True, "state": "Paused", "pauseSeconds": None}
MANIFEST = {"tensors": [{"name": "w", "dtype": "float32", "shape": [4]}]}
RENDEZVOUS = {"host": "127.0.0.1", "port": 1}
JOIN = {
    "transport": "Layout",
    "wire": "Gloo",
    "rendezvous": RENDEZVOUS,
    "trainerRanks": 2,
    "rankOffset": 3,
    "worldSize": 5,
    "deadlineSeconds": 5,
}


class RankDouble:
    """Rank operations that hold no weights; ``receive`` blocks until aborted where told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failure: Exception | None = None
        self.blocks = False
        self.entered = threading.Event()
        self.aborted = threading.Event()
        self.joined_as: int | None = None
        self.orders: list[tuple[str, dict]] = []
        self.layout_changed = False
        self.seconds = 0.1
        self.lent = threading.Event()

    def describe(self):
        return {"vllm_version": "0.32.0", "nccl_version": "", "device": "cpu"}

    def check(self, body):
        return {"missing": ["model.norm.weight"], "extra": [], "misshapen": [], "consumed": {}, "layout": LAYOUT}

    def join(self, body, cancelled):
        self.orders.append(("join", body))
        self.joined_as = body["rank"]
        return {"rank": body["rank"]}

    def prepare(self, body, cancelled):
        self.orders.append(("prepare", body))
        if self.failure:
            raise self.failure
        return {"staging_bytes": 100, "seconds": self.seconds}

    def free(self):
        self.orders.append(("free", {}))
        return {}

    def shape(self):
        return {"shape": f"shape-{self.rank}", "live_digest": f"live-{self.rank}"}

    def offer(self, body):
        return {"host": "127.0.0.1", "port": 7}

    def lend(self, body):
        self.orders.append(("lend", body))
        self.entered.set()
        self.lent.wait(20)
        return {}

    def borrow(self, body, cancelled):
        self.orders.append(("borrow", body))
        return self.receive(body, cancelled)

    def let_go(self):
        self.lent.set()

    def receive(self, body, cancelled):
        self.orders.append(("receive", body))
        if self.blocks:
            self.entered.set()
            self.aborted.wait(20)
            raise RankError(f"rank {self.rank}: aborted", touched=True)
        if self.failure:
            raise self.failure
        return {
            "tensors": 1,
            "nbytes": 16,
            "received_digest": f"received-{self.rank}",
            "live_digest": f"live-{self.rank}",
            "layout": LAYOUT,
            "layout_changed": self.layout_changed,
            "receive_seconds": self.seconds,
            "load_seconds": 0.2,
        }

    def abort(self):
        self.aborted.set()
        self.lent.set()


class EngineDouble:
    """Records what the pod asks of vLLM."""

    def __init__(self) -> None:
        self.paused = False
        self.cache_resets: bool | Exception = True
        self.resets = 0
        self.door = Door.CLOSED
        self.version = 0
        self.swaps: list[tuple[int, bool, bool]] = []
        self.swap_answer: Swapped | ProblemError | None = None
        self.sleep_refusal = ""
        self.slept: list[str] = []

    async def swap(self, version: int, *, reset_cache: bool, pause: bool, deadline_seconds: float):
        self.swaps.append((version, reset_cache, pause))
        if isinstance(self.swap_answer, ProblemError):
            raise self.swap_answer
        return self.swap_answer or Swapped(cache_reset=True if reset_cache else None, pause_seconds=0.008)

    async def refuses_sleep(self, deadline_seconds: float):
        return self.sleep_refusal

    async def sleep(self, level, deadline_seconds: float):
        self.slept.append(f"sleep {level:d} behind a door {self.door}")

    async def wake(self, tags, deadline_seconds: float):
        self.slept.append(f"wake {' '.join(tags)}")

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
        await self.joined()
        await self.call("pause", mode="Keep", deadlineSeconds=30)

    async def receive(self, deadline: float = 10):
        return await self.call("receive", version=1, manifestDigest="m", deadlineSeconds=deadline, holdSeconds=30)

    async def joined(self):
        await self.call("admit", version=0)
        await self.call("join", **JOIN)

    async def stage(self, *, deadline: float = 10, hold: float = 30):
        return await self.call(
            "receive", version=1, manifestDigest="m", staged=True, deadlineSeconds=deadline, holdSeconds=hold
        )

    def ordered(self, op: str) -> list[dict]:
        return [body for rank in self.ranks for name, body in rank.orders if name == op]


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
    engine_pod = EnginePod(
        Fence(identity=identity), 0, ranks, 2, engine, lambda: killed.append(True), {}, Locality(host="h", memory="m")
    )
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
    assert await pod.call("commit", version=1, cache="Reset") == (200, COMMITTED | {"state": "Serving"})
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


@pytest.mark.row("A-U5")
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
    assert (status, problem["code"]) == (409, "WrongState")
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
