"""Refits that go on without the members that they lose."""

import pytest

from fakes.engine import FakeEngine
from fakes.simulation import DEADLINES, MANIFEST, Simulation
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport
from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase, RefitView, TrainerFailed, TrainerSent
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.model import Verb

ABSENT_SECONDS = DEADLINES.absent_seconds


def fleet(engines: int = 3, *, staged: bool = False, min_ready: int = 1) -> Simulation:
    """A fleet at version 1 with an open session; without staging, refits are broadcast in place."""
    policy = RefitPolicy(
        transport=Transport.AUTO if staged else Transport.GLOO,
        staging=Staging.AUTO if staged else Staging.NEVER,
        min_ready=min_ready,
        deadlines=DEADLINES,
    )
    sim = Simulation(engines=engines, policy=policy)
    for engine in sim.workers.values():
        engine.calibrated = True
    sim.start()
    sim.settle()
    sim.open_session()
    assert sim.run_refit(1, "r0").phase is Phase.COMPLETE
    return sim


def follow(sim: Simulation, refit: str = "r1", *, until: Phase | None = None) -> RefitView:
    return sim.follow(refit, until=until, rounds=60, seconds=0.5)


def begin(sim: Simulation, until: Phase = Phase.TRANSFERRING, version: int = 2) -> None:
    sim.request(version)
    follow(sim, until=until)


def die(sim: Simulation, engine: int) -> FakeEngine:
    """The engine's pod is gone without a word; who calls it gets no answer."""
    gone = sim.workers[engine]
    sim.cut.add(gone.name)
    for transfer in [each for each in sim.transfers if each[1] is gone]:
        sim.transfers.remove(transfer)
        sim.apply(sim.no_answer(transfer[0]))
        sim._handling = [each for each in sim._handling if each[1] is not gone]
    return gone


def assert_survivors_serve(sim: Simulation, version: int, lost: FakeEngine) -> None:
    for _ in range(3):
        sim.settle()
        sim.advance(1.0)
    survivors = [engine for engine in sim.workers.values() if engine is not lost]
    assert survivors
    for engine in survivors:
        assert engine.serves
        assert engine.weights == (version, sim.published[version])
    if lost.name not in sim.cut:
        assert lost.weights == (version, sim.published[version])


@pytest.mark.scenario("F60")
@pytest.mark.scenario("F74")
@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_the_same_refit_completes_on_the_survivors_of_a_member_that_dies_in_the_transfer(staged: bool):
    sim = fleet(staged=staged)
    begin(sim)
    first = sim.view()
    lost = die(sim, 1)
    assert sim.view().phase is Phase.ABORTING
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    assert (view.refit, view.version, view.attempt) == ("r1", 2, 2)
    assert view.epoch > first.epoch
    result = view.result
    assert result.members == (sim.workers[0].name, sim.workers[2].name)
    (attempt,) = result.attempts
    assert (attempt.attempt, attempt.epoch) == (1, first.epoch)
    (member,) = attempt.lost
    assert (member.pod_name, member.phase, member.code) == (lost.name, "Transferring", ProblemCode.MEMBER_ABSENT)
    assert {"Reforming", "Aborting", "Transferring"} <= result.seconds.keys()
    assert_survivors_serve(sim, 2, lost)


def test_a_victim_that_speaks_first_is_not_taken_for_the_one_that_is_gone():
    sim = fleet()
    begin(sim)
    gone = sim.workers[1]
    sim.workers[1] = FakeEngine(gone.member, instance="restarted")
    sim.end_transfer(0, whole=False)
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    ((lost,),) = [attempt.lost for attempt in view.result.attempts]
    assert lost.pod_name == gone.name
    assert lost.message.startswith(f"the container of {gone.name} restarted; first noticed as: ")


def test_a_trainer_that_was_cut_off_is_not_at_fault_and_the_one_that_it_saw_go_is():
    sim = fleet()
    begin(sim)
    epoch = sim.view().epoch
    failed = TrainerFailed(epoch=epoch, message="rank 2 is gone", peer_lost=True, lost_ranks=(2,))
    sim.apply(events.TrainerHasFailed("r1", failed))
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    assert [lost.pod_name for attempt in view.result.attempts for lost in attempt.lost] == [sim.workers[1].name]
    assert_survivors_serve(sim, 2, sim.workers[1])


def test_a_connection_that_broke_although_everybody_is_there_fails_the_refit():
    sim = fleet()
    begin(sim)
    sim.end_transfer(0, whole=False)
    view = follow(sim)
    assert view.phase is Phase.FAILED
    assert (view.problem.code, view.attempt) == (ProblemCode.PEER_LOST, 1)


STEPS = [Verb.CHECK, Verb.JOIN, Verb.PREPARE, Verb.PAUSE, Verb.RECEIVE]


@pytest.mark.scenario("F19")
@pytest.mark.parametrize("verb", STEPS)
@pytest.mark.parametrize("refused", [True, False], ids=["refused", "no answer"])
def test_a_member_that_is_lost_in_any_step_is_left_out_and_the_others_complete(verb: Verb, refused: bool):
    policy = RefitPolicy(transport=Transport.AUTO, staging=Staging.NEVER, deadlines=DEADLINES)
    sim = Simulation(engines=3, policy=policy)
    sim.start()
    sim.settle()
    sim.open_session()
    lost = sim.workers[2]
    sim.request(1)
    for _ in range(400):
        held = next((call for call in sim.calls if call.verb is verb and call.pod_uid == lost.member.pod_uid), None)
        if held is not None:
            break
        view = sim.view()
        if sim.answers:
            sim.deliver_answer()
        elif sim.calls:
            sim.deliver_call()
        elif sim.writes:
            sim.end_write()
        elif view.join is not None:
            sim.join()
        elif view.prepare is not None:
            sim.prepare()
    assert held is not None
    sim.calls.remove(held)
    if refused:
        problem = Problem(code=ProblemCode.ENGINE_FAILED, message="no", member=lost.name)
        sim.apply(events.CallFailed(held.call, problem, refused=True))
    else:
        sim.cut.add(lost.name)
        sim.apply(sim.no_answer(held))
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    assert view.result.members == (sim.workers[0].name, sim.workers[1].name)
    assert [each.pod_name for attempt in view.result.attempts for each in attempt.lost] == [lost.name]
    assert_survivors_serve(sim, 1, lost)


@pytest.mark.scenario("F78")
@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_a_node_that_is_drained_between_the_last_byte_and_the_commit_costs_its_member_alone(staged: bool):
    sim = fleet(staged=staged)
    begin(sim)
    epoch = sim.view().epoch
    sim.sent[epoch, 2] = "bytes"
    while sim.transfers or sim.answers:
        sim.end_transfer() if sim.transfers else sim.deliver_answer()
    assert sim.view().phase is Phase.VERIFYING
    drained = sim.workers.pop(1)
    sim.workers[1] = sim.new_engine(1)
    sim.apply(events.RosterChanged(sim.roster))
    with pytest.raises(ProblemError):
        sim.apply(
            events.TrainerHasSent(
                "r1",
                TrainerSent(epoch=epoch, tensors=len(MANIFEST.tensors), nbytes=MANIFEST.nbytes, digests={"": "bytes"}),
            )
        )
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    assert view.epoch > epoch
    assert view.result.members == (sim.workers[0].name, sim.workers[2].name)
    assert view.result.attempts[0].lost[0].pod_name == drained.name
    assert not sim.workers[1].serves or sim.workers[1].weights == (2, sim.published[2])


def test_the_one_whose_bytes_differ_is_out_and_dirty_and_the_others_commit():
    sim = fleet()
    sim.workers[2].corrupts = True
    begin(sim)
    view = follow(sim, until=Phase.REFORMING)
    assert sim.workers[2].fence.state is WorkerState.DIRTY
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    lost = view.result.attempts[0].lost
    assert [(each.pod_name, each.phase, each.code) for each in lost] == [
        (sim.workers[2].name, "Verifying", ProblemCode.DIGEST_MISMATCH)
    ]
    assert view.result.members == (sim.workers[0].name, sim.workers[1].name)
    assert_survivors_serve(sim, 2, sim.workers[2])


def test_bytes_that_differ_everywhere_are_the_trainers_or_the_wires_fault():
    sim = fleet()
    for engine in sim.workers.values():
        engine.corrupts = True
    begin(sim)
    view = follow(sim)
    assert (view.phase, view.attempt) == (Phase.FAILED, 1)
    assert view.problem.code is ProblemCode.DIGEST_MISMATCH
    assert sim.stored.version == 1


def test_members_lost_one_after_another_cost_an_attempt_each_until_too_few_are_left():
    sim = fleet(min_ready=2)
    begin(sim)
    first = die(sim, 0)
    follow(sim, until=Phase.TRANSFERRING)
    assert sim.view().attempt == 2
    second = die(sim, 1)
    view = follow(sim)
    assert (view.phase, view.attempt) == (Phase.FAILED, 2)
    assert view.problem.member == second.name
    assert view.problem.message.endswith("; 1 engine is left, refit.minReady is 2")
    assert [each.pod_name for attempt in sim.state.refit.ended for each in attempt.lost] == [first.name]
    assert sim.stored.version == 1


def test_a_second_loss_while_the_first_is_being_aborted_is_of_the_same_attempt():
    sim = fleet(4)
    begin(sim)
    die(sim, 0)
    assert sim.view().phase is Phase.ABORTING
    sim.workers[1] = FakeEngine(sim.workers[1].member, instance="restarted")
    view = follow(sim)
    assert (view.phase, view.attempt) == (Phase.COMPLETE, 2)
    assert sorted(each.pod_name for each in view.result.attempts[0].lost) == sorted(
        [sim.workers[0].name, sim.workers[1].name]
    )


def test_a_survivor_that_restarts_while_the_group_forms_again_is_late_and_not_in():
    sim = fleet(3)
    begin(sim)
    die(sim, 0)
    follow(sim, until=Phase.REFORMING)
    again = FakeEngine(sim.workers[1].member, instance="restarted")
    sim.workers[1] = again
    sim.advance(1.0)
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    assert view.result.members == (sim.workers[2].name,)


def test_one_that_comes_back_while_the_group_forms_again_is_late_and_not_in():
    sim = fleet(2)
    begin(sim)
    lost = die(sim, 0)
    follow(sim, until=Phase.REFORMING)
    sim.cut.clear()
    sim.workers[0] = FakeEngine(lost.member, instance="restarted")
    sim.advance(1.0)
    view = follow(sim)
    assert view.phase is Phase.COMPLETE
    assert view.result.members == (sim.workers[1].name,)
    for _ in range(4):
        sim.settle()
        sim.advance(1.0)
    assert sim.workers[0].serves
    assert sim.workers[0].weights == (2, sim.published[2])
    assert sim.run_refit(3, "r3").result.members == (sim.workers[0].name, sim.workers[1].name)


def test_a_trainer_that_dies_while_the_group_forms_again_ends_the_refit():
    sim = fleet()
    begin(sim)
    die(sim, 0)
    follow(sim, until=Phase.REFORMING)
    sim.apply(events.SessionClosed("s1"))
    sim.settle()
    assert sim.view().phase is Phase.FAILED
    assert sim.view().problem.code is ProblemCode.SESSION_LOST


def test_what_a_trainer_says_of_an_attempt_that_is_over_changes_nothing():
    sim = fleet()
    begin(sim)
    epoch = sim.view().epoch
    die(sim, 0)
    follow(sim, until=Phase.REFORMING)
    sim.apply(events.TrainerHasFailed("r1", TrainerFailed(epoch=epoch, message="ArithmeticError: old")))
    assert follow(sim).phase is Phase.COMPLETE


def test_a_trainer_that_gives_up_between_two_attempts_ends_the_refit():
    sim = fleet()
    begin(sim)
    die(sim, 0)
    sim.apply(events.TrainerHasFailed("r1", TrainerFailed(epoch=0, message="KeyboardInterrupt")))
    assert follow(sim).phase is Phase.FAILED


def test_a_sync_job_that_restarts_while_the_group_forms_again_gives_the_intent_up():
    sim = fleet()
    begin(sim)
    lost = die(sim, 0)
    follow(sim, until=Phase.REFORMING)
    assert (sim.stored.intent.version, sim.stored.intent.attempt) == (2, 1)
    sim.restart_sync()
    sim.settle()
    assert sim.state.record.intent is None
    sim.open_session("s2")
    assert sim.run_refit(2, "r2", "s2").phase is Phase.COMPLETE
    assert_survivors_serve(sim, 2, lost)


def test_a_trainer_that_fixed_the_size_of_the_group_gets_no_smaller_one():
    sim = fleet()
    sim.apply(events.SessionClosed("s1"))
    sim.settle()
    sim.open_session("s2", world_size=4)
    sim.request(2, session="s2")
    follow(sim, until=Phase.TRANSFERRING)
    die(sim, 0)
    assert follow(sim).phase is Phase.FAILED


@pytest.mark.scenario("F62")
def test_a_refit_waits_a_while_for_an_engine_that_is_not_there_and_then_goes_on_without_it():
    sim = fleet(2)
    sim.engines = 3
    sim.apply(events.RosterChanged(sim.roster))
    asked = sim.now
    view = sim.run_refit(2)
    assert view.phase is Phase.COMPLETE
    assert ABSENT_SECONDS <= sim.now - asked <= ABSENT_SECONDS + 2
    asked = sim.now
    assert sim.run_refit(3, "r3").phase is Phase.COMPLETE
    assert sim.now - asked < 2, "it was left behind before, and is not waited for again"
    late = sim.workers[2] = sim.new_engine(2)
    sim.apply(events.RosterChanged(sim.roster))
    for _ in range(4):
        sim.settle()
        sim.advance(1.0)
    assert late.serves
    assert late.weights == (3, sim.published[3])
    assert len(sim.run_refit(4, "r4").result.members) == 3


def test_fewer_engines_than_min_ready_are_waited_for_as_long_as_forming_may_take():
    sim = fleet(2, min_ready=2)
    sim.cut.add(sim.workers[1].name)
    asked = sim.now
    sim.request(2)
    for _ in range(DEADLINES.forming_seconds + 1):
        sim.settle()
        sim.advance(1.0)
        if sim.view().phase is Phase.FORMING:
            sim.apply(events.SessionRenewed("s1"))
    assert sim.view().phase is Phase.FAILED
    assert sim.view().problem.code is ProblemCode.MEMBER_ABSENT
    assert sim.now - asked >= DEADLINES.forming_seconds
