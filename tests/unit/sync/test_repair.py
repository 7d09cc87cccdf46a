"""A repair: the committed version sent again, to the engines that lack it and to nobody else."""

from dataclasses import replace

import pytest

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.policy import LateJoin, RefitPolicy, Strategy, Transport
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import CallWorker
from rolloutfleet_sync.protocol.model import Verb
from rolloutfleet_sync.protocol.view import view_fleet


def fleet(engines: int = 2, version: int = 1, **policy: object) -> Simulation:
    """A fleet whose engines all serve this version, and do not borrow from each other."""
    given = {"transport": Transport.GLOO, "deadlines": DEADLINES, "late_join": LateJoin.WAIT} | policy
    sim = Simulation(engines=engines, policy=RefitPolicy.model_validate(given))
    sim.start()
    sim.settle()
    sim.open_session()
    assert sim.run_refit(version, "r0").phase is Phase.COMPLETE
    return sim


def restart(sim: Simulation, engine: int) -> None:
    """The engine's container starts anew, with the weights of its start, and has been told of the fleet's version."""
    sim.restart(engine)
    for _ in range(8):
        sim.advance(1.0)
        sim.settle()
        sim.apply(events.SessionRenewed("s1"))


def called(sim: Simulation, since: int, *verbs: Verb) -> set[str]:
    return {c.pod_name for c in sim.commands[since:] if isinstance(c, CallWorker) and c.verb in verbs}


def states(sim: Simulation) -> list[tuple[WorkerState, int]]:
    return [(member.state, member.version) for member in view_fleet(sim.state).members]


@pytest.mark.scenario("F48")
def test_a_repair_brings_the_version_to_the_engines_that_lack_it_and_leaves_the_others_alone():
    sim = fleet(engines=3)
    restart(sim, 1)
    assert states(sim) == [(WorkerState.SERVING, 1), (WorkerState.SERVING, 0), (WorkerState.SERVING, 1)]
    before = len(sim.commands)
    view = sim.run_refit(1, repair=True)
    assert view.phase is Phase.COMPLETE, view.problem
    assert view.result is not None
    late = sim.workers[1].name
    assert view.result.members == (late,)
    sim.settle()
    assert states(sim) == [(WorkerState.SERVING, 1)] * 3
    assert called(sim, before, Verb.PAUSE, Verb.RECEIVE, Verb.COMMIT, Verb.RESUME) == {late}
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    sim.settle()
    assert states(sim) == [(WorkerState.SERVING, 2)] * 3


def test_a_fleet_that_has_lost_every_copy_of_its_version_gets_it_back():
    sim = fleet(min_ready=2)
    for engine in (0, 1):
        restart(sim, engine)
    assert states(sim) == [(WorkerState.SERVING, 0)] * 2
    assert sim.run_refit(1, repair=True).phase is Phase.COMPLETE
    sim.settle()
    assert states(sim) == [(WorkerState.SERVING, 1)] * 2


def test_fewer_than_the_fewest_engines_of_a_refit_are_repaired_all_the_same():
    sim = fleet(engines=3, min_ready=3)
    restart(sim, 0)
    assert sim.run_refit(1, repair=True).phase is Phase.COMPLETE


def test_a_repair_in_a_fleet_that_rolls_goes_to_all_that_lack_the_version():
    sim = fleet(engines=3)
    sim.state = replace(sim.state, policy=sim.state.policy.model_copy(update={"strategy": Strategy.ROLLING}))
    restart(sim, 0)
    restart(sim, 1)
    view = sim.run_refit(1, repair=True)
    assert view.phase is Phase.COMPLETE, view.problem
    assert view.result is not None
    assert len(view.result.members) == 2


def test_a_repair_with_nothing_to_repair_says_so():
    sim = fleet()
    view = sim.run_refit(1, repair=True)
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.message == "every engine that answers holds version 1 already; there is nothing to repair"
    sim.settle()
    assert states(sim) == [(WorkerState.SERVING, 1)] * 2


@pytest.mark.parametrize("asked", [1, 3])
def test_a_repair_of_another_version_than_the_committed_one_is_refused_with_both(asked: int):
    sim = fleet(version=2)
    with pytest.raises(ProblemError, match=f"a repair brings the committed version, 2, not version {asked}"):
        sim.request(asked, repair=True)


def test_a_trainer_that_has_fixed_the_world_size_cannot_repair():
    sim = fleet()
    sim.apply(events.SessionClosed("s1"))
    sim.open_session("s2", world_size=3)
    with pytest.raises(ProblemError, match="a session that has fixed the world size, to 3"):
        sim.request(1, session="s2", repair=True)


@pytest.mark.scenario("F46")
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_what_a_repair_that_fails_has_brought_is_never_taken_for_the_committed_version(restarts: int):
    """It has the committed version's number, so only the epoch tells it from a version whose commit was missed."""
    sim = fleet()
    restart(sim, 1)
    sim.request(1, repair=True)
    late = sim.workers[1]
    for _ in range(60):
        if late.report().state is WorkerState.RECEIVED:
            break
        view = sim.view()
        if sim.transfers:
            sim.sent[view.epoch, 1] = "unverified"
            sim.end_transfer()
        elif sim.answers:
            sim.deliver_answer()
        elif sim.calls:
            sim.deliver_call()
        elif sim.writes:
            sim.end_write()
        elif view.join is not None and "trainer" in view.waiting_for:
            sim.join()
        else:
            sim.advance(1.0)
    assert late.report().state is WorkerState.RECEIVED
    before = len(sim.commands)
    sim.cut.add(late.name)  # the abort does not reach it
    if restarts == 0:
        sim.fail()
        sim.settle()
    for _ in range(restarts):
        sim.restart_sync()
        sim.settle()
    sim.cut.clear()
    for _ in range(20):
        sim.advance(1.0)
        sim.settle()
    assert called(sim, before, Verb.COMMIT) == set()
    assert late.report().state is WorkerState.DIRTY
    assert sim.stored.version == 1


def test_the_epoch_that_a_repair_has_given_up_stays_given_up_when_the_sync_job_restarts_during_the_next_one():
    sim = fleet()
    restart(sim, 1)
    sim.request(1, repair=True)
    while sim.stored.intent is None:
        if not (sim.step() or sim.obey()):
            sim.advance(1.0)
    assert sim.stored.intent.repair
    assert (sim.stored.version, sim.stored.intent.version) == (1, 1)
    sim.restart_sync()
    sim.settle()
    assert sim.state.record is not None
    assert sim.state.record.epoch > sim.stored.epoch
    sim.open_session("s2")
    view = sim.run_refit(1, "r2", session="s2", repair=True)
    assert view.phase is Phase.COMPLETE, view.problem
    sim.settle()
    assert states(sim) == [(WorkerState.SERVING, 1)] * 2


def test_an_engine_that_is_to_wait_borrows_from_nobody():
    sim = fleet()
    before = len(sim.commands)
    restart(sim, 1)
    for _ in range(20):
        sim.advance(1.0)
        sim.settle()
    assert called(sim, before, Verb.LEND, Verb.BORROW) == set()
