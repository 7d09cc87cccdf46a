"""Refits through the real sync server: what goes well, and who is named when it does not."""

import asyncio
from typing import Any

import aiohttp
import pytest

from fakes.syncjob import Fleet
from fakes.trainer import MANIFEST, FakeTrainer
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.policy import RefitDeadlines, Transport
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Check, Join, Receive, WorkerState


async def test_two_refits_in_a_row_keep_the_group_and_the_checked_manifest(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    first = await trainer.refit(1)
    assert first.phase is Phase.COMPLETE
    assert first.result is not None
    assert first.result.members == ("f-0-0-0", "f-1-0-0")
    assert (first.result.version, first.result.nbytes) == (1, MANIFEST.nbytes)
    assert set(first.result.seconds) == {
        "Forming", "Pausing", "Transferring", "Verifying", "Committing", "Resuming"
    }  # fmt: skip
    assert first.result.pause_seconds > 0
    before = [len(worker.verbs) for worker in fleet.workers]
    second = await trainer.refit(2)
    assert second.phase is Phase.COMPLETE
    assert second.epoch == first.epoch
    for worker, seen in zip(fleet.workers, before, strict=True):
        assert worker.verbs[seen:] == ["pause", "receive", "commit", "resume"]
        assert worker.engine.weights == (2, "bytes-2")
        assert worker.engine.serves


@pytest.mark.row("B05")
@pytest.mark.scenario("F13")
async def test_ranks_are_a_permutation_with_the_trainer_first(start_fleet: Any, http: aiohttp.ClientSession):
    fleet = await start_fleet(engines=3, ranks=2)
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await trainer.open(world_size=7)
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    joins = [call for worker in fleet.workers for name, call in worker.engine.calls if name == "Join"]
    assert all(isinstance(join, Join) and join.world_size == 7 for join in joins)
    taken = [join.rank_offset + rank for join in joins for rank in range(2)]
    assert sorted([0, *taken]) == list(range(7))


@pytest.mark.scenario("F12")
@pytest.mark.scenario("F14")
@pytest.mark.row("B47")
async def test_join_and_receive_reach_every_engine_before_any_of_them_answers(fleet: Fleet, trainer: FakeTrainer):
    for worker in fleet.workers:
        worker.hangs.add("join")
    await trainer.open()
    view = await trainer.request(1)
    async with asyncio.timeout(5):
        for worker in fleet.workers:
            await worker.event("join").wait()
    assert (await trainer.poll(view.refit, wait=0)).waiting_for == ("f-0-0-0", "f-1-0-0", "trainer")
    for worker in fleet.workers:
        worker.hangs.clear()
    fleet.clock.skip(fleet.policy.deadlines.forming_seconds)
    await trainer.open(take_over=True)
    view = await trainer.request(1)
    view = await trainer.follow(view, until=lambda v: v.send is not None)
    async with asyncio.timeout(5):
        for worker in fleet.workers:
            await worker.event("receive").wait()
    assert (await trainer.follow(view)).phase is Phase.COMPLETE


@pytest.mark.scenario("F70")
@pytest.mark.scenario("F46")
async def test_the_version_is_shown_only_once_it_is_committed(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.follow(await trainer.request(5), until=lambda v: v.send is not None)
    assert (await trainer.fleet()).version == 0
    assert fleet.store.document["version"] == 0
    assert fleet.store.document["intent"]["version"] == 5
    fleet.store.gate = asyncio.Event()
    await trainer.sent(view)
    await fleet.store.committing.wait()
    assert (await trainer.fleet()).version == 0
    assert not any(worker.event("commit").is_set() for worker in fleet.workers)
    fleet.store.gate.set()
    assert (await trainer.follow(view)).phase is Phase.COMPLETE
    assert (await trainer.fleet()).version == 5
    assert "intent" not in fleet.store.document


async def test_nothing_is_written_between_intent_and_commit_and_nothing_at_rest(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    versions = [(document["version"], "intent" in document) for document in fleet.store.documents]
    first_intent = versions.index((0, True))
    assert versions[first_intent + 1] == (1, False)
    fleet.clock.skip(2)
    await fleet.until_admitted()
    await asyncio.sleep(0.1)
    fleet.clock.skip(2)
    await asyncio.sleep(0.1)
    written = len(fleet.store.documents)
    for _ in range(5):
        fleet.clock.skip(1)
        await trainer.call("POST", f"sessions/{trainer.session}/renew")
    await asyncio.sleep(0.1)
    assert len(fleet.store.documents) == written
    last = fleet.store.document
    assert last["phase"] == "Ready"
    assert last["members"] == {"total": 2, "admitted": 2}
    assert last["lastRefit"]["outcome"] == "Complete"


@pytest.mark.scenario("F45")
async def test_manifest_faults_name_every_tensor_before_anything_is_paused(fleet: Fleet, trainer: FakeTrainer):
    fleet.workers[1].engine.tensors = frozenset({"a", "c"})
    await trainer.open()
    view = await trainer.refit(1)
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.code is ProblemCode.MANIFEST_MISMATCH
    assert view.problem.member == "f-1-0-0"
    assert view.problem.message == (
        "the manifest of version 1 does not fit the model on 1 of 2 engines: f-1-0-0: missing: c; extra: b; "
        "nothing was paused or changed"
    )
    assert all("pause" not in worker.verbs for worker in fleet.workers)
    assert all(worker.engine.serves and worker.engine.weights == (0, "") for worker in fleet.workers)


async def test_an_engine_without_a_pod_is_named_when_the_group_does_not_form(
    start_fleet: Any, http: aiohttp.ClientSession
):
    fleet = await start_fleet(min_ready=3)
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    fleet.engines = 3
    fleet.rosters.change(fleet.make_roster())
    await fleet.until(lambda state: state.roster.engines == 3)
    await trainer.open()
    view = await trainer.request(1)
    await fleet.until(lambda state: state.active is not None and not state.active.waiting)
    assert (await trainer.poll(view.refit, wait=0)).waiting_for == ("engine-2",)
    for _ in range(5):
        fleet.clock.skip(25)
        await trainer.poll(view.refit, wait=0)
    view = await trainer.follow(view)
    assert view.problem is not None
    assert view.problem.code is ProblemCode.MEMBER_ABSENT
    assert "1 of 3 engines did not come within" in view.problem.message
    assert view.problem.message.endswith("engine 2 has no pod")


async def test_a_silent_member_is_named_with_the_reason(fleet: Fleet, trainer: FakeTrainer):
    await fleet.workers[1].kill()
    await trainer.open()
    view = await trainer.request(1)
    await fleet.until(lambda state: state.active is not None and state.active.waiting == {"uid-f-1-0-0"})
    for _ in range(5):
        fleet.clock.skip(25)
        await trainer.poll(view.refit, wait=0)
    view = await trainer.follow(view)
    assert view.problem is not None
    assert (view.problem.code, view.problem.member) == (ProblemCode.MEMBER_ABSENT, "f-1-0-0")
    assert "f-1-0-0 does not answer: f-1-0-0 at 127.0.0.1:" in view.problem.message


@pytest.mark.scenario("F25")
async def test_an_environment_that_differs_is_named_with_both_values(start_fleet: Any, http: aiohttp.ClientSession):
    fleet = await start_fleet(transport=Transport.NATIVE)
    for worker in fleet.workers:
        worker.engine.environment = {"NCCL_CUMEM_ENABLE": "1", "NCCL_SOCKET_IFNAME": worker.name}
        worker.engine.device = f"GPU-{worker.name}"
        await worker.restart()
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    await trainer.open(environment={"NCCL_CUMEM_ENABLE": "0"}, devices=("GPU-t",), nccl_version="2.28")
    view = await trainer.refit(1)
    assert view.problem is not None
    assert view.problem.code is ProblemCode.ENVIRONMENT_MISMATCH
    assert view.problem.message == (
        "NCCL_CUMEM_ENABLE is '0' on trainer but '1' on f-0-0-0, f-1-0-0; make them equal on trainer and engines, "
        "a group that differs hangs"
    )
    assert all("join" not in worker.verbs for worker in fleet.workers)


@pytest.mark.row("B47")
@pytest.mark.scenario("F21")
async def test_a_wrong_world_size_is_refused_with_both_numbers(fleet: Fleet, trainer: FakeTrainer):
    with pytest.raises(ProblemError) as refused:
        await trainer.open(world_size=5)
    assert refused.value.code is ProblemCode.WORLD_SIZE_MISMATCH
    assert str(refused.value) == (
        "trainer t1 counts a world of 5, fleet f has 3: 2 workers on 2 engines and 1 trainer rank; "
        "leave worldSize out or correct it"
    )


@pytest.mark.scenario("F53")
async def test_bytes_that_differ_from_what_was_sent_are_never_published(fleet: Fleet, trainer: FakeTrainer):
    fleet.workers[1].engine.corrupts = True
    await trainer.open()
    view = await trainer.refit(1)
    assert view.problem is not None
    assert (view.problem.code, view.problem.member) == (ProblemCode.DIGEST_MISMATCH, "f-1-0-0")
    assert (await trainer.fleet()).version == 0
    assert all(worker.engine.fence.state is WorkerState.DIRTY for worker in fleet.workers)
    fleet.workers[1].engine.corrupts = False
    assert (await trainer.refit(1)).phase is Phase.COMPLETE


@pytest.mark.scenario("F53")
@pytest.mark.row("A42")
async def test_a_cache_that_was_not_reset_is_no_success(fleet: Fleet, trainer: FakeTrainer):
    fleet.workers[1].engine.cache_answer = False
    await trainer.open()
    view = await trainer.refit(1)
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert (view.problem.code, view.problem.member) == (ProblemCode.CACHE_NOT_RESET, "f-1-0-0")
    assert view.problem.message.startswith("version 1 is committed and f-0-0-0 serve it, but f-1-0-0 did not reset")
    assert view.result is not None
    assert view.result.members == ("f-0-0-0",)
    assert fleet.workers[0].engine.serves
    assert not fleet.workers[1].engine.serves
    assert (await trainer.fleet()).version == 1


@pytest.mark.row("B31")
@pytest.mark.scenario("F03")
async def test_a_worker_that_refuses_ends_the_refit_for_everybody(fleet: Fleet, trainer: FakeTrainer):
    fleet.workers[1].refuses["join"] = ProblemError(ProblemCode.ENGINE_FAILED, "no free port")
    await trainer.open()
    view = await trainer.refit(1)
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.member == "f-1-0-0"
    assert view.problem.message == "f-1-0-0: no free port; 1 engine is left, refit.minReady is 2"
    assert all("abort" in worker.verbs and "pause" not in worker.verbs for worker in fleet.workers)
    assert all(worker.engine.serves for worker in fleet.workers)


@pytest.mark.scenario("F45")
@pytest.mark.scenario("F66")
@pytest.mark.scenario("F67")
async def test_a_worker_killed_in_mid_transfer_is_named_and_dirty_ones_never_resume(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    for worker in fleet.workers:
        worker.event("receive").clear()
    view = await trainer.follow(await trainer.request(2), until=lambda v: v.send is not None)
    for worker in fleet.workers:
        await worker.event("receive").wait()
    started = fleet.clock.now()
    await fleet.workers[1].kill()
    view = await trainer.wait_for(view.refit, Phase.FAILED)
    assert fleet.clock.now() - started < 3
    assert view.problem is not None
    assert view.problem.member == "f-1-0-0"
    assert view.problem.phase == "Transferring"
    survivor = fleet.workers[0].engine
    assert survivor.fence.state is WorkerState.DIRTY
    assert not survivor.serves
    assert "resume" not in fleet.workers[0].verbs[fleet.workers[0].verbs.index("receive", 5) :]
    fleet.workers[1] = await fleet.new_worker(1, incarnation=1).start()
    fleet.rosters.change(fleet.make_roster())
    assert (await trainer.refit(2)).phase is Phase.COMPLETE
    await fleet.until_admitted()


@pytest.mark.scenario("F66")
async def test_an_abort_before_the_transfer_leaves_every_engine_serving_the_old_version(
    fleet: Fleet, trainer: FakeTrainer
):
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    fleet.workers[1].refuses["pause"] = ProblemError(ProblemCode.ENGINE_FAILED, "vLLM does not pause")
    view = await trainer.refit(2)
    assert view.phase is Phase.FAILED
    assert all(worker.engine.serves and worker.engine.weights == (1, "bytes-1") for worker in fleet.workers)


async def test_a_container_that_restarts_in_place_ends_the_refit(fleet: Fleet, trainer: FakeTrainer):
    fleet.workers[1].hangs.add("receive")
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.send is not None)
    await fleet.workers[1].event("receive").wait()
    await fleet.workers[1].restart()
    view = await trainer.wait_for(view.refit, Phase.FAILED)
    assert view.problem is not None
    assert view.problem.member == "f-1-0-0"
    assert (await trainer.refit(1)).phase is Phase.COMPLETE


async def test_a_replaced_pod_ends_the_refit_and_both_pods_are_named(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.send is not None)
    old = fleet.workers[1]
    fleet.workers[1] = await fleet.new_worker(1, incarnation=1).start()
    fleet.rosters.change(fleet.make_roster())
    view = await trainer.wait_for(view.refit, Phase.FAILED)
    await old.kill()
    assert view.problem is not None
    assert view.problem.message.startswith("f-1-0-0 of engine 1 was replaced by f-1-0-1 during the refit")


@pytest.mark.scenario("F62")
async def test_an_engine_that_comes_late_and_finds_no_peer_is_not_ready_before_the_next_refit(
    fleet: Fleet, trainer: FakeTrainer
):
    await trainer.open()
    assert (await trainer.refit(7)).phase is Phase.COMPLETE
    fleet.workers[0].refuses["lend"] = ProblemError(ProblemCode.ENGINE_FAILED, "no memory to lend from")
    await fleet.workers[1].restart()
    late = fleet.workers[1].engine
    await fleet.until(lambda _: late.fence.admitted == 7)
    assert not late.serves
    view = await trainer.fleet()
    assert [member.ready for member in view.members] == [True, False]
    assert view.members[1].message.startswith("Stale: holds version 0, the fleet has committed version 7")
    assert len(view.endpoints) == 1
    assert (await trainer.refit(8)).phase is Phase.COMPLETE
    assert late.serves


@pytest.mark.scenario("F77")
async def test_a_pod_that_took_over_an_address_is_not_mistaken_for_the_member(fleet: Fleet, trainer: FakeTrainer):
    stranger = fleet.new_worker(1, incarnation=9)
    stranger.port = fleet.workers[1].port
    await fleet.workers[1].kill()
    await stranger.start()
    await fleet.until(lambda state: state.members["uid-f-1-0-0"].failure is not None)
    before = list(stranger.verbs)
    fleet.clock.skip(1)
    await fleet.until(lambda state: "answers as f-1-0-9" in state.members["uid-f-1-0-0"].failure.message)
    assert stranger.verbs == before == []
    await stranger.kill()


async def test_a_phase_that_takes_too_long_names_who_did_not_answer(start_fleet: Any, http: aiohttp.ClientSession):
    fleet = await start_fleet(deadlines=RefitDeadlines(pausing_seconds=20), min_ready=2)
    trainer = FakeTrainer(http, fleet.url, fleet.wire)
    fleet.workers[0].hangs.add("pause")
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.waiting_for == ("f-0-0-0",))
    fleet.clock.skip(20)
    view = await trainer.wait_for(view.refit, Phase.FAILED)
    assert view.problem is not None
    assert (view.problem.code, view.problem.member) == (ProblemCode.DEADLINE_EXCEEDED, "f-0-0-0")
    assert view.problem.message.startswith("phase Pausing ended after 20 s: no answer to pause from f-0-0-0")


async def test_a_manifest_of_20000_tensors_passes(fleet: Fleet, trainer: FakeTrainer):
    names = (f"model.layers.{i % 64}.mlp.experts.{i}.down_proj.weight" for i in range(20_000))
    tensors = tuple(TensorSpec(name=name, dtype="bfloat16", shape=(1,)) for name in names)
    manifest = Manifest(tensors=tensors)
    await trainer.open()
    view = await trainer.follow(await trainer.request(1, manifest), until=lambda v: v.send is not None)
    await trainer.sent(view, manifest=manifest)
    await trainer.wait_for(view.refit, Phase.COMPLETE)
    calls = dict(fleet.workers[0].engine.calls)
    check, receive = calls["Check"], calls["Receive"]
    assert isinstance(check, Check)
    assert isinstance(receive, Receive)
    assert check.manifest == manifest
    assert receive.manifest_digest == manifest.digest()


async def test_a_cache_reset_lists_every_engine(fleet: Fleet, trainer: FakeTrainer):
    fleet.engines = 3
    fleet.rosters.change(fleet.make_roster())
    await fleet.until(lambda state: state.roster.engines == 3)
    fleet.workers[1].engine.cache_answer = False
    answer = await trainer.call("POST", "cache/reset")
    assert answer == b'{"reset":{"engine-2":false,"f-0-0-0":true,"f-1-0-0":false}}'
