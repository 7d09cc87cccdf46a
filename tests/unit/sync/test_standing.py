"""What an engine that lacks the version is called, and that status and metrics count it by that word."""

from fakes.simulation import DEADLINES, Simulation
from rolloutfleet.contract.history import Standing
from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.policy import RefitPolicy, RollingPolicy, Strategy, Transport
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_sync.metrics import Metrics
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.standing import count_states
from rolloutfleet_sync.protocol.summary import summarize_status

STALE_SECONDS = 60


def fleet(engines: int, strategy: Strategy) -> Simulation:
    """A fleet that serves version 1 on engine 0, from which nobody can borrow."""
    policy = RefitPolicy(
        transport=Transport.AUTO,
        deadlines=DEADLINES,
        strategy=strategy,
        rolling=RollingPolicy(max_unavailable=1, max_stale_seconds=STALE_SECONDS),
    )
    sim = Simulation(engines=engines, policy=policy)
    sim.start()
    sim.settle()
    sim.open_session()
    for worker in sim.workers.values():
        worker.shape = f"of {worker.name} alone"
    sim.run_refit(1)
    sim.settle()
    return sim


def behind(sim: Simulation) -> dict[int, str]:
    assert sim.state.record is not None
    status = WeightSyncStatus.model_validate(summarize_status(sim.state, sim.state.record))
    return {laggard.engine: laggard.state for laggard in status.behind}


def test_an_engine_that_serves_an_older_version_by_leave_is_stale_and_not_late():
    sim = fleet(3, Strategy.ROLLING)
    assert count_states(sim.state) == {"Serving": 1, "Stale": 2, "Absent": 0}
    assert behind(sim) == {1: "Stale", 2: "Stale"}
    assert sim.state.record is not None
    members = WeightSyncStatus.model_validate(summarize_status(sim.state, sim.state.record)).members
    assert members is not None
    assert (members.total, members.admitted, members.stale) == (3, 1, 2)


def test_one_whose_time_is_over_is_overdue_and_not_late():
    sim = fleet(2, Strategy.ROLLING)
    for _ in range(STALE_SECONDS + 5):
        sim.advance(1.0)
        sim.settle()
    assert count_states(sim.state) == {"Serving": 1, "Overdue": 1, "Absent": 0}
    assert behind(sim) == {1: "Overdue"}


def test_one_that_comes_up_without_the_version_is_late():
    sim = fleet(2, Strategy.ALL_AT_ONCE)
    sim.workers[1] = sim.new_engine(1)
    sim.workers[1].shape = "another"
    sim.apply(events.RosterChanged(sim.roster))
    for _ in range(3):
        sim.advance(1.0)
        sim.settle()
    late = {name: count for name, count in count_states(sim.state).items() if count}
    assert late == {"Serving": 1, "Late": 1}
    assert behind(sim) == {1: "Late"}


def test_one_that_does_not_answer_is_silent_and_one_without_a_pod_absent():
    sim = fleet(3, Strategy.ALL_AT_ONCE)
    sim.cut.add(sim.workers[1].name)
    roster = sim.roster
    sim.apply(events.RosterChanged(Roster(**{**roster.model_dump(), "members": roster.members[:2]})))
    for _ in range(20):
        sim.advance(1.0)
        sim.settle()
    assert count_states(sim.state) == {"Serving": 1, "Silent": 1, "Absent": 1}


def test_metrics_have_a_series_for_each_word_from_the_start():
    sim = fleet(3, Strategy.ROLLING)
    registry = Metrics("f", lambda: sim.state, lambda: sim.now).registry
    counted = {
        word: registry.get_sample_value("rolloutfleet_engines", {"fleet": "f", "state": word.value})
        for word in Standing
    }
    assert counted == {
        Standing.STALE: 2,
        Standing.OVERDUE: 0,
        Standing.LATE: 0,
        Standing.SILENT: 0,
        Standing.ABSENT: 0,
    }
