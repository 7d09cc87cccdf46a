"""How a refit begins: the ledger, the choice, and what is prepared when."""

import pytest

from fakes.simulation import DEADLINES, MANIFEST, Simulation
from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport, Wire
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import Phase, SleepFleet, WakeFleet
from rolloutfleet.contract.worker import CheckReport, Join, SleepLevel
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.model import Verb


def fleet(
    engines: int = 2, *, calibrated: bool = True, staging: Staging = Staging.NEVER, min_ready: int = 1
) -> Simulation:
    policy = RefitPolicy(transport=Transport.AUTO, staging=staging, deadlines=DEADLINES, min_ready=min_ready)
    sim = Simulation(engines=engines, policy=policy)
    for engine in sim.workers.values():
        engine.calibrated = calibrated
    sim.start()
    sim.settle()
    sim.open_session()
    return sim


def begin(sim: Simulation, version: int = 1, refit: str = "r1") -> None:
    """A refit up to where trainer and workers prepare."""
    sim.request(version, refit)
    sim.settle()
    if sim.view(refit).join is not None:
        sim.join(refit)


def test_workers_and_trainer_prepare_at_the_same_time_from_the_same_layouts():
    sim = fleet()
    begin(sim)
    assert sim.view().phase is Phase.PREPARING
    view = sim.view()
    assert view.waiting_for == (*(engine.name for engine in sim.workers.values()), "trainer")
    assert view.prepare is not None
    assert view.prepare.layouts == ("placed-0", "placed-0")
    prepares = [call.message for call in sim.calls if call.verb is Verb.PREPARE]
    assert {prepare.layouts for prepare in prepares} == {view.prepare.layouts}
    assert {prepare.manifest_digest for prepare in prepares} == {MANIFEST.digest()}
    sim.prepare()
    assert not sim.writes
    sim.settle()
    assert sim.view().phase is Phase.TRANSFERRING


@pytest.mark.parametrize("missing", ["trainer", "engine"])
def test_a_preparation_that_takes_too_long_names_who_did_not_answer(missing: str):
    sim = fleet(min_ready=2)
    begin(sim)
    if missing == "engine":
        sim.prepare()
        sim.calls = [call for call in sim.calls if call.pod_uid != sim.workers[1].member.pod_uid]
    sim.settle()
    for _ in range(DEADLINES.preparing_seconds):
        sim.advance(1.0)
        sim.settle()
    view = sim.view()
    assert view.problem is not None
    name = "trainer" if missing == "trainer" else sim.workers[1].name
    assert (view.problem.code, view.problem.member) == (ProblemCode.DEADLINE_EXCEEDED, name)
    assert view.problem.message.startswith(f"phase Preparing ended after 10 s: no answer to prepare from {name}")
    assert all(engine.serves for engine in sim.workers.values())


def test_a_message_of_another_step_prepares_nothing():
    sim = fleet()
    begin(sim)
    sim.prepare()
    sim.settle()
    before = sim.state
    sim.apply(events.TrainerHasPrepared("r1", events.TrainerPrepared(epoch=sim.view().epoch)))
    assert sim.state == before


def test_another_manifest_is_checked_and_prepared_in_the_kept_group():
    sim = fleet()
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    before = len(sim.verbs())
    sim.request(2, "r1", manifest=MANIFEST.model_copy(update={"tensors": MANIFEST.tensors[:1]}))
    sim.settle()
    sim.prepare()
    sim.settle()
    assert sim.verbs()[before:] == ["check"] * 2 + ["prepare"] * 2 + ["pause"] * 2 + ["receive"] * 2


def test_a_group_of_another_wire_is_formed_anew():
    sim = fleet()
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    epoch = sim.state.epoch
    before = len(sim.verbs())
    sim.request(2, "r1", manifest=MANIFEST.model_copy(update={"tensors": MANIFEST.tensors[:1]}))
    while not (checks := [call for call in sim.calls if call.verb is Verb.CHECK]):
        sim.deliver_answer() if sim.answers else sim.deliver_call()
    for call in checks:
        sim.calls.remove(call)
        sim.apply(events.CallAnswered(call.call, CheckReport(faults={})))
    assert sim.state.epoch == epoch + 1
    joins = [c for c in sim.commands if isinstance(c, CallWorker) and c.verb is Verb.JOIN][-2:]
    for call in joins:
        assert isinstance(call.message, Join)
        assert (call.message.transport, call.message.wire) == (Transport.GLOO, Wire.GLOO)
    assert sim.verbs()[before:] == ["check"] * 2 + ["join"] * 2


def test_a_group_that_ends_while_it_prepares_ends_the_refit():
    sim = fleet(min_ready=2)
    begin(sim)
    stranger = sim.workers[1]
    stranger.fence = stranger.fence.accept(
        sim.calls[0].message.model_copy(
            update={"pod_uid": stranger.member.pod_uid, "instance": stranger.instance, "epoch": 40}
        )
    )
    sim.prepare()
    sim.advance(1.0)
    sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.problem.code is ProblemCode.STALE_EPOCH


def test_one_engine_that_sleeps_ends_the_refit_whichever_order_they_report_in():
    for order in (0, -1):
        sim = fleet(min_ready=2)
        sleeper = sim.workers[1]
        sim.apply(events.SleepRequested("q", SleepFleet(level=SleepLevel.OFFLOAD)))
        sim.settle()
        sim.workers[0].fence = sim.workers[0].fence.woken(sim.workers[0].fence.asleep)
        sim.request(1)
        while sim.view().phase is Phase.FORMING:
            sim.deliver_answer(order) if sim.answers else sim.deliver_call()
        view = sim.view()
        assert view.problem is not None
        assert view.problem.member == sleeper.name
        assert view.problem.message.startswith(f"{sleeper.name} sleeps: wake the fleet first")


def test_a_refit_that_comes_while_the_fleet_falls_asleep_waits_and_then_says_so():
    sim = fleet()
    sim.apply(events.SleepRequested("q", SleepFleet(level=SleepLevel.OFFLOAD)))
    sim.request(1)
    assert sim.view().phase is Phase.PENDING
    sim.settle()
    assert sim.view().phase is Phase.FAILED
    sim.apply(events.WakeRequested("w", WakeFleet()))
    sim.settle()
    assert sim.run_refit(1, "r2").phase is Phase.COMPLETE


def test_a_sleep_ends_a_preparation_that_a_kept_group_relied_on():
    sim = fleet(staging=Staging.AUTO)
    assert sim.run_refit(1, "r0").result.staged
    sim.apply(events.SleepRequested("q", SleepFleet(level=SleepLevel.OFFLOAD)))
    sim.settle()
    sim.apply(events.WakeRequested("w", WakeFleet()))
    sim.settle()
    before = len(sim.verbs())
    assert sim.run_refit(2).result.staged
    assert sim.verbs()[before:].count("prepare") == 2


def test_a_manifest_is_checked_again_once_workers_have_forgotten_it():
    sim = fleet()
    one, two = (MANIFEST.model_copy(update={"tensors": MANIFEST.tensors[index:][:1]}) for index in range(2))
    checked = []
    for version, manifest in enumerate((MANIFEST, one, MANIFEST, two, MANIFEST, one), start=1):
        before = sim.verbs().count("check")
        assert sim.run_refit(version, f"r{version}", manifest=manifest).phase is Phase.COMPLETE
        checked.append(sim.verbs().count("check") > before)
    assert checked == [True, True, False, True, False, True]


def test_adapters_and_weights_do_not_drive_each_other_out():
    sim = fleet()
    styles = [AdapterSpec(name="style", rank=8, alpha=alpha) for alpha in range(1, 5)]
    assert sim.run_refit(1, "r1").phase is Phase.COMPLETE
    for version, adapter in enumerate(styles, start=2):
        assert sim.run_refit(version, f"r{version}", adapter=adapter).phase is Phase.COMPLETE
    before = sim.verbs().count("check")
    assert sim.run_refit(6, "r6").phase is Phase.COMPLETE
    assert sim.run_refit(7, "r7", adapter=styles[0]).phase is Phase.COMPLETE
    assert sim.verbs().count("check") == before
