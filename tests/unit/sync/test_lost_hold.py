"""Whoever let a lease or a pause run out is named, with the seconds and what to do: in the refit's error, its status and its event."""

from fakes.simulation import Simulation
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_operator.api.fleetstatus import Weights
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_operator.status.weights import weights_events
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.model import Timing, Verb
from rolloutfleet_sync.protocol.summary import summarize_status


def transferring() -> Simulation:
    """A refit of version 1 whose transfers do not end."""
    sim = Simulation(timing=Timing(lease=10))
    sim.start()
    sim.settle()
    sim.open_session()
    sim.begin(1)
    while len(sim.transfers) < sim.engines:
        assert sim.obey() or sim.step()
    return sim


def stand_still(sim: Simulation, seconds: float) -> None:
    """Let time pass for the engines alone, and then for the sync job too."""
    sim.now += seconds
    sim._run_engines()
    for _ in range(15):
        sim.settle()
        sim.advance(1.0)


def told(sim: Simulation) -> tuple[str, str, str]:
    """The message in the trainer's answer, in the status, and in the event."""
    assert sim.state.record is not None
    status = WeightSyncStatus.model_validate(summarize_status(sim.state, sim.state.record))
    assert status.last_refit is not None
    problem = sim.view().problem
    assert problem is not None
    (event,) = weights_events(Weights(), Weights(last_refit=status.last_refit))
    return problem.message, status.last_refit.message, event.message


def test_a_trainer_whose_lease_ends_is_named_with_its_seconds_and_what_to_do():
    sim = transferring()
    for _ in range(30):
        sim.advance(1.0)
        sim.settle()
    problem = sim.view().problem
    assert problem is not None
    assert (problem.code, problem.member) == (ProblemCode.SESSION_LOST, "trainer")
    for message in told(sim):
        assert (
            "the lease of trainer trainer-s1 ended: it made no call for 10 s, its lease is 10 s; see whether it was "
            in message
        )
        assert "then connect again and refit" in message


def test_a_sync_job_that_stood_still_names_itself_and_not_the_trainer_alone():
    sim = transferring()
    stand_still(sim, 25)
    for message in told(sim):
        assert "it made no call for 25 s, its lease is 10 s (the sync job itself stood still for 15 s of it)" in message


def test_a_phase_whose_end_the_sync_job_slept_through_says_so():
    sim = transferring()
    sim.now += 200
    sim._run_engines()
    sim.apply(events.SessionRenewed("s1"))
    for _ in range(15):
        sim.settle()
        sim.advance(1.0)
    for message in told(sim):
        assert (
            "phase Transferring ended after 200 s (the sync job itself stood still for 170 s of it): no answer"
            in message
        )


def test_the_words_of_workers_that_ended_a_pause_by_themselves_say_why_an_attempt_ended():
    sim = Simulation()
    sim.start()
    sim.settle()
    sim.open_session()
    sim.request(1)
    while not [call for call in sim.calls if call.verb is Verb.RECEIVE]:
        assert sim.obey() or sim.step()
    for worker in sim.workers.values():
        fence = worker._pod.fence.aborted("nobody called").resumed()
        worker._pod.fence = fence.gives_up("the sync job of fleet f let the pause of epoch 1 pass its 11 s")
    assert sim.follow().phase is Phase.COMPLETE
    assert sim.state.record is not None
    refit = WeightSyncStatus.model_validate(summarize_status(sim.state, sim.state.record)).last_refit
    assert refit is not None
    assert "the sync job of fleet f let the pause of epoch 1 pass its 11 s" in refit.attempts[0].why
