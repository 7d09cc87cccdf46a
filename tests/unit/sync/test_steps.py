"""Single paths through the protocol that a whole refit over HTTP cannot show."""

import pytest

from fakes.engine import FakeEngine
from fakes.simulation import DEADLINES, MANIFEST, Simulation
from rolloutfleet.contract.addresses import control_base, generation_base
from rolloutfleet.contract.policy import CachePolicy, RefitPolicy, Transport
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Admit, WorkerState
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import PublishStatus, WriteCommit, WriteIntent
from rolloutfleet_sync.protocol.machine import may_publish, next_wakeup
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.record import Intent, Record
from rolloutfleet_sync.protocol.summary import judge_readiness, summarize_status
from rolloutfleet_sync.protocol.view import phase_of


@pytest.fixture
def sim() -> Simulation:
    made = Simulation()
    made.start()
    made.settle()
    return made


@pytest.fixture
def strict() -> Simulation:
    """A fleet that refits both engines or none."""
    policy = RefitPolicy(transport=Transport.GLOO, deadlines=DEADLINES, min_ready=2)
    made = Simulation(policy=policy)
    made.start()
    made.settle()
    return made


def test_nothing_wakes_the_protocol_before_the_next_heartbeat(sim: Simulation):
    sim.advance(1.0)
    sim.settle()
    assert next_wakeup(sim.state) == pytest.approx(sim.now + sim.timing.heartbeat, abs=1.0)
    before = len(sim.commands)
    for _ in range(20):
        sim.advance(5.0)
        sim.settle()
    assert not any(isinstance(command, PublishStatus) for command in sim.commands[before:])


def test_trainers_wait_until_status_and_roster_are_known():
    sim = Simulation()
    sim.apply(events.Tick())
    with pytest.raises(ProblemError, match="has not read the fleet's status yet"):
        sim.open_session()
    sim.read_status()
    with pytest.raises(ProblemError, match="has not read the fleet's roster yet"):
        sim.open_session()
    assert phase_of(sim.state) is Phase.PENDING
    sim.apply(events.RosterChanged(sim.roster))
    sim.open_session()
    assert phase_of(sim.state) is Phase.READY


def test_an_unreadable_status_is_read_again():
    sim = Simulation()
    sim.apply(events.Tick())
    sim.reads = 0
    sim.apply(events.StatusUnreadable("no answer"))
    sim.advance(2.0)
    assert sim.reads == 1


def test_the_epoch_rises_above_what_any_worker_has_seen(sim: Simulation):
    sim.restart_sync()
    sim.workers[1].fence = sim.workers[1].fence.accept(sim_admit(sim, 41))
    sim.settle()
    sim.open_session()
    view = sim.run_refit(1)
    assert view.phase is Phase.COMPLETE
    assert view.epoch == 42


def sim_admit(sim: Simulation, epoch: int):
    worker = sim.workers[1]
    return Admit(fleet_uid="fleet-uid", pod_uid=worker.member.pod_uid, instance=worker.instance, epoch=epoch, version=0)


@pytest.mark.scenario("F46")
def test_no_engine_is_told_to_publish_before_the_commit_is_durable(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.send()
    while sim.transfers or sim.answers:
        sim.end_transfer() if sim.transfers else sim.deliver_answer()
    assert [type(write) for write in sim.writes] == [WriteCommit]
    assert "commit" not in sim.verbs()
    assert sim.state.version == 0
    assert not may_publish(sim.state)
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE
    assert sim.state.version == 1


def test_the_intent_is_durable_before_the_first_pause(sim: Simulation):
    sim.open_session()
    sim.request(1)
    while not sim.writes:
        if sim.view().join is not None and "trainer" in sim.view().waiting_for:
            sim.join()
        elif sim.calls:
            sim.deliver_call()
        else:
            sim.deliver_answer()
    assert [type(write) for write in sim.writes] == [WriteIntent]
    assert "pause" not in sim.verbs()
    sim.end_write()
    assert sim.verbs().count("pause") == 2


def test_a_member_lost_after_the_decision_is_left_behind_and_the_others_go_on(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.send()
    while sim.transfers or sim.answers:
        sim.end_transfer() if sim.transfers else sim.deliver_answer()
    gone = sim.workers[1]
    sim.workers[1] = sim.new_engine(1)
    sim.apply(events.RosterChanged(sim.roster))
    sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name,)
    assert view.problem is not None
    assert view.problem.message == (
        f"version 1 is committed and {sim.workers[0].name} serve it, but {gone.name} of engine 1 was replaced by "
        f"{sim.workers[1].name} during the refit"
    )
    sim.advance(3.0)
    sim.settle()
    assert sim.workers[0].serves


def test_a_commit_that_gets_no_answer_is_repeated(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.cut.add(sim.workers[1].name)
    sim.send()
    while sim.transfers or sim.answers or sim.writes:
        if sim.writes:
            sim.end_write()
        elif sim.transfers:
            sim.end_transfer()
        else:
            sim.deliver_answer()
    sim.settle()
    assert sim.view().phase is Phase.COMMITTING
    assert sim.view().waiting_for == (sim.workers[1].name,)
    sim.cut.clear()
    sim.advance(1.0)
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE


def test_a_silent_member_is_lost_long_before_the_transfers_deadline(strict: Simulation):
    sim = strict
    sim.open_session()
    sim.begin()
    sim.cut.add(sim.workers[1].name)
    started = sim.now
    while sim.view().phase is Phase.TRANSFERRING:
        sim.advance(1.0)
        sim.settle()
    assert sim.now - started <= sim.timing.unreachable + 3
    view = sim.view()
    assert view.problem is not None
    assert view.problem.code is ProblemCode.MEMBER_ABSENT
    assert view.problem.message.startswith(f"{sim.workers[1].name} has not answered for 10 s: ")


def test_a_victims_broken_connection_does_not_hide_who_is_gone(strict: Simulation):
    sim = strict
    sim.open_session()
    sim.begin()
    gone = sim.workers[1]
    sim.workers[1] = FakeEngine(gone.member, instance="restarted")
    sim.end_transfer(0, whole=False)
    sim.settle()
    view = sim.view()
    assert view.problem is not None
    assert (view.problem.code, view.problem.member) == (ProblemCode.MEMBER_ABSENT, gone.name)
    assert view.problem.message.startswith(f"the container of {gone.name} restarted; first noticed as: ")


def test_a_new_pod_beside_the_members_does_not_disturb_a_refit(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.engines = 3
    sim.workers[2] = sim.new_engine(2)
    sim.apply(events.RosterChanged(sim.roster))
    sim.send()
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    assert sim.view("r2").result.members == tuple(worker.name for worker in sim.workers.values())


def test_keeping_the_cache_is_a_policy_and_no_failure():
    sim = Simulation(policy=RefitPolicy(transport=Transport.GLOO, cache=CachePolicy.KEEP))
    sim.start()
    sim.settle()
    for engine in sim.workers.values():
        engine.cache_answer = False
    sim.open_session()
    assert sim.run_refit(1).phase is Phase.COMPLETE


def test_another_manifest_is_checked_again_in_a_kept_group(sim: Simulation):
    sim.open_session()
    sim.run_refit(1)
    before = len(sim.verbs())
    sim.request(2, "r2", manifest=MANIFEST.model_copy(update={"tensors": MANIFEST.tensors[:1]}))
    sim.settle()
    assert sim.verbs()[before:][:2] == ["check", "check"]
    assert "join" not in sim.verbs()[before:]


def test_a_trainer_that_takes_over_waits_for_the_abort_and_then_goes_on(sim: Simulation):
    sim.open_session("s1")
    sim.begin()
    sim.open_session("s2", take_over=True)
    sim.request(1, "r2", "s2")
    assert sim.view("r1").phase is Phase.ABORTING
    assert sim.view("r2").phase is Phase.PENDING
    sim.settle()
    assert sim.view("r1").phase is Phase.FAILED
    assert sim.view("r2").phase is Phase.FORMING


def test_what_every_member_holds_whole_is_not_committed_by_a_successor(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.receive_all()
    assert all(worker.fence.state is WorkerState.RECEIVED for worker in sim.workers.values())
    sim.restart_sync()
    sim.settle()
    assert (sim.state.version, sim.stored.version) == (0, 0)
    assert sim.state.record.intent is None
    assert all(worker.fence.state is WorkerState.DIRTY for worker in sim.workers.values())
    sim.open_session("s2")
    assert sim.run_refit(1, "r2", "s2").phase is Phase.COMPLETE


def test_a_successor_answers_trainers_although_members_of_the_old_refit_are_silent(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.cut = {worker.name for worker in sim.workers.values()}
    sim.restart_sync()
    sim.settle()
    assert judge_readiness(sim.state).reason == "AnswersTrainers"
    sim.open_session("s2")


def test_the_committed_version_of_an_earlier_attempt_is_not_taken_for_the_committed_one(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.receive_all()
    stray = sim.workers.pop(1)
    sim.engines = 1
    sim.apply(events.RosterChanged(sim.roster))
    sim.calls = [call for call in sim.calls if call.pod_uid != stray.member.pod_uid]
    sim.settle()
    sim.join()
    sim.settle()
    sim.send()
    sim.settle()
    assert sim.view().phase is Phase.COMPLETE
    assert stray.fence.state is WorkerState.RECEIVED
    sim.workers[1], sim.engines = stray, 2
    sim.apply(events.RosterChanged(sim.roster))
    before = len(sim.verbs())
    for _ in range(5):
        sim.settle()
        sim.advance(1.0)
    assert sim.verbs()[before:][:3] == ["abort", "lend", "borrow"]
    assert stray.serves
    assert stray.weights == sim.workers[0].weights != (1, "bytes")


def test_a_pod_that_comes_during_a_refit_never_serves_the_old_version_beside_the_new_one(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.workers[2], sim.engines = sim.new_engine(2), 3
    sim.apply(events.RosterChanged(sim.roster))
    sim.settle()
    sim.advance(2.0)
    sim.settle()
    assert sim.workers[2].fence.admitted is None
    sim.send()
    while sim.transfers or sim.answers:
        sim.end_transfer() if sim.transfers else sim.deliver_answer()
    sim.end_write()
    sim.cut.add(sim.workers[2].name)
    for _ in range(30):
        sim.settle()
        sim.advance(1.0)
    assert sim.view().phase is Phase.COMPLETE
    assert not sim.workers[2].serves
    sim.cut.clear()
    sim.advance(2.0)
    sim.settle()
    assert sim.workers[2].fence.admitted == 1
    assert not sim.workers[2].serves


def test_a_pod_that_came_during_a_refit_serves_once_the_refit_has_failed(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.workers[2], sim.engines = sim.new_engine(2), 3
    sim.apply(events.RosterChanged(sim.roster))
    sim.settle()
    sim.fail()
    sim.settle()
    sim.advance(2.0)
    sim.settle()
    assert sim.workers[2].serves


def test_engines_get_the_whole_deadline_however_long_the_commit_took_to_write(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.receive_all()
    sim.tell_sent()
    sim.advance(DEADLINES.committing_seconds - 0.5)
    sim.end_write()
    commits = [call for call in sim.calls if call.verb is Verb.COMMIT]
    assert len(commits) == 2
    assert all(call.seconds >= DEADLINES.committing_seconds for call in commits)
    receive = next(call for name, call in sim.workers[0].calls if name == "Receive")
    whole_wait = DEADLINES.verifying_seconds + 2 * DEADLINES.committing_seconds + DEADLINES.resuming_seconds
    assert receive.hold_seconds == whole_wait


def test_a_member_that_gives_a_received_version_up_ends_the_refit_before_the_commit(strict: Simulation):
    sim = strict
    sim.open_session()
    sim.begin()
    sim.receive_all()
    worker = sim.workers[1]
    worker.fence = worker.fence.aborted("it waited too long")
    sim.advance(1.0)
    sim.settle()
    sim.advance(1.0)
    sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.problem.member == worker.name
    assert view.problem.message.startswith(
        f"{worker.name} no longer holds version 1: it is Dirty (version 1 was received"
    )
    assert sim.stored.version == 0


def test_a_container_that_restarts_between_commit_and_resume_is_no_success(sim: Simulation):
    sim.open_session()
    sim.begin()
    sim.receive_all()
    sim.tell_sent()
    sim.end_write()
    while not any(call.verb is Verb.RESUME for call in sim.calls):
        sim.deliver_call() if sim.calls else sim.deliver_answer()
    old = sim.workers[1]
    fresh = sim.workers[1] = FakeEngine(old.member, instance="restarted")
    call = next(call for call in sim.calls if call.pod_uid == old.member.pod_uid and call.verb is Verb.RESUME)
    sim.calls.remove(call)
    sim.apply(events.CallAnswered(call.call, fresh.report()))
    sim.settle()
    view = sim.view()
    assert view.phase is Phase.FAILED
    assert view.problem.code is ProblemCode.MEMBER_ABSENT
    assert "instance i2 became restarted" in view.problem.message


@pytest.mark.parametrize("fault", ["denied", "error"])
def test_an_engine_whose_cache_was_not_reset_stays_fenced_until_it_is(sim: Simulation, fault: str):
    stubborn = sim.workers[1]
    stubborn.cache_answer, stubborn.cache_fails = fault != "denied", fault == "error"
    sim.open_session()
    view = sim.run_refit(1)
    assert (view.phase, view.problem.code) == (Phase.FAILED, ProblemCode.CACHE_NOT_RESET)
    assert view.result.members == (sim.workers[0].name,)
    for _ in range(20):
        sim.advance(5.0)
        sim.settle()
        assert not stubborn.serves
    assert stubborn.fence.state is WorkerState.DIRTY
    assert sim.verbs().count("borrow") <= 6, "a peer is asked ever more rarely"
    stubborn.cache_answer, stubborn.cache_fails = True, False
    sim.open_session("s2")
    assert sim.run_refit(2, "r2", "s2").phase is Phase.COMPLETE
    assert stubborn.serves


def test_the_status_says_what_the_schema_knows(sim: Simulation):
    sim.open_session(world_size=3)
    sim.run_refit(1)
    status = summarize_status(sim.state, sim.state.record)
    parsed = WeightSyncStatus.model_validate(status)
    shown = parsed.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert shown == status
    assert parsed.last_refit is not None
    assert parsed.last_refit.outcome == "Complete"


def test_an_intent_survives_its_storage_and_ends_with_its_commit():
    intent = Intent(epoch=3, version=2)
    stored = Record(epoch=3, version=1, intent=intent).model_dump(mode="json", by_alias=True)
    assert Record.model_validate(stored).intent == intent
    assert Record.model_validate(stored | {"version": 2}).intent is None


@pytest.mark.parametrize(
    ("address", "control", "generation"),
    [
        ("10.0.0.1", "http://10.0.0.1:8001", "http://10.0.0.1:8000"),
        ("fd00::1", "http://[fd00::1]:8001", "http://[fd00::1]:8000"),
        ("127.0.0.1:9101", "http://127.0.0.1:9101", "http://127.0.0.1:9100"),
    ],
)
def test_addresses_of_every_kind_become_urls(address: str, control: str, generation: str):
    assert control_base(address, 8001) == control
    assert generation_base(address) == generation
