"""Members that are drained, about to go, or retired: who takes part, who is waited for, and what the others get."""

import pytest

from fakes.simulation import Simulation
from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol.events import RosterChanged
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.summary import judge_readiness


@pytest.fixture
def sim() -> Simulation:
    made = Simulation(engines=3)
    made.start()
    made.settle()
    made.open_session()
    return made


def receive_all(sim: Simulation) -> None:
    """Every engine has the version whole, and nothing is decided."""
    sim.receive_all()
    assert sim.view().phase is Phase.VERIFYING


@pytest.mark.scenario("F78")
def test_a_node_that_is_drained_between_the_last_byte_and_the_commit_costs_the_others_nothing(sim: Simulation):
    sim.begin()
    receive_all(sim)
    before = sim.view()
    drained = sim.workers.pop(1)
    sim.apply(RosterChanged(sim.roster))
    view = sim.follow()
    assert view.phase is Phase.COMPLETE
    assert view.attempt == 2
    assert view.epoch > before.epoch
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name, sim.workers[2].name)
    assert drained.name not in view.result.members
    assert sim.stored.version == 1
    assert all(engine.serves and engine.fence.version == 1 for engine in sim.workers.values())


def test_an_engine_that_is_told_to_end_after_the_decision_commits_and_resumes_with_the_others(sim: Simulation):
    sim.begin()
    receive_all(sim)
    sim.tell_sent()
    assert sim.writes
    drained = sim.workers[1]
    left = tuple(member for member in sim.roster.members if member.engine != 1)
    sim.apply(RosterChanged(sim.roster.model_copy(update={"members": left})))
    view = sim.follow()
    assert view.phase is Phase.COMPLETE
    assert view.attempt == 1
    assert (drained.fence.version, drained.fence.state) == (1, WorkerState.SERVING)


def test_one_that_is_gone_by_then_is_a_casualty_at_once(sim: Simulation):
    sim.begin()
    receive_all(sim)
    sim.tell_sent()
    gone = sim.workers.pop(1)
    sim.apply(RosterChanged(sim.roster))
    started = sim.now
    sim.settle()
    view = sim.view()
    assert (view.phase, sim.now) == (Phase.FAILED, started)
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name, sim.workers[2].name)
    assert view.problem is not None
    assert f"{gone.name} of engine 1 left the fleet during the refit" in view.problem.message


def test_an_engine_that_says_itself_that_it_has_been_told_to_end_is_left_out_at_once(sim: Simulation):
    sim.begin()
    leaving = sim.workers[2]
    leaving.fence = leaving.fence.leaves("the pod has been told to end")
    sim.advance(sim.timing.heartbeat + 1)
    sim.settle()
    view = sim.follow()
    assert view.phase is Phase.COMPLETE
    assert view.result is not None
    assert leaving.name not in view.result.members


@pytest.mark.scenario("F78")
@pytest.mark.parametrize("first", ["the one that leaves", "another one"])
def test_a_transfer_that_an_engine_told_to_end_breaks_off_goes_on_without_it(sim: Simulation, first: str):
    sim.begin()
    leaving = sim.workers[1]
    leaving.fence = leaving.fence.leaves("the pod has been told to end")
    said_by = leaving if first == "the one that leaves" else sim.workers[2]
    sim.end_transfer([engine for _, engine in sim.transfers].index(said_by), whole=False)
    view = sim.follow()
    assert view.phase is Phase.COMPLETE
    assert view.result is not None
    assert view.result.members == (sim.workers[0].name, sim.workers[2].name)
    assert [(lost.pod_name, lost.code) for lost in view.result.attempts[0].lost] == [
        (leaving.name, ProblemCode.MEMBER_ABSENT)
    ]


def with_leaving(sim: Simulation, engine: int) -> Roster:
    roster = sim.roster
    members = tuple(m.model_copy(update={"leaving": m.engine == engine}) for m in roster.members)
    return roster.model_copy(update={"members": members})


def test_nobody_waits_for_a_member_that_is_about_to_go(sim: Simulation):
    sim.apply(RosterChanged(with_leaving(sim, 1)))
    sim.cut.add(sim.workers[1].name)
    started = sim.now
    view = sim.run_refit(1)
    assert view.phase is Phase.COMPLETE
    assert view.result is not None
    assert sim.workers[1].name not in view.result.members
    assert sim.now - started < sim.policy.deadlines.absent_seconds


@pytest.mark.scenario("F74")
def test_engines_come_and_go_while_trainer_and_sync_job_stay_as_they_are(sim: Simulation):
    assert sim.run_refit(1).phase is Phase.COMPLETE
    epochs = [sim.state.epoch]
    session = sim.state.session
    retired = sim.workers.pop(1)
    sim.engines = 2
    sim.apply(RosterChanged(sim.roster.model_copy(update={"retired": (1,)})))
    started = sim.now
    two = sim.run_refit(2, "r2")
    epochs.append(sim.state.epoch)
    assert two.result is not None
    assert two.result.members == (sim.workers[0].name, sim.workers[2].name)
    assert sim.now - started < sim.policy.deadlines.absent_seconds
    assert f"{retired.name}" not in judge_readiness(sim.state).message
    assert judge_readiness(sim.state).message.startswith("2 of 2 engines hold version 2")
    sim.engines = 3
    sim.workers[1] = sim.new_engine(1)
    sim.apply(RosterChanged(sim.roster))
    three = sim.run_refit(3, "r3")
    epochs.append(sim.state.epoch)
    assert three.result is not None
    assert three.result.members == tuple(sim.workers[engine].name for engine in range(3))
    assert epochs == sorted(set(epochs))
    assert sim.state.session is not None
    assert session is not None
    assert sim.state.session.id == session.id
    assert sim.verbs().count(Verb.JOIN.value) == 3 + 2 + 3


def test_what_is_missing_is_told_by_engine_without_those_that_are_retired():
    roster = Roster(fleet="f", fleet_uid="u", engines=2, retired=(1, 3), members=())
    assert roster.missing == (0, 2)
