"""What the status tells: history within its bounds, who is missing, which variable differs, who lags behind."""

import json
from datetime import UTC, datetime

from fakes.simulation import Simulation
from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_operator.api.history import MAX_LINES, MAX_REFITS
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_sync.protocol.summary import (
    HISTORY_BYTES,
    KEPT_ENTRIES,
    KEPT_LINES,
    Readiness,
    bound_history,
    find_gaps,
    summarize_status,
    wall_clock,
)
from rolloutfleet_sync.store import render_document

READY = Readiness(True, "AnswersTrainers", "")
WALL = wall_clock(datetime(2030, 1, 1, tzinfo=UTC).timestamp())


def started(engines: int = 2, **fields) -> Simulation:
    made = Simulation(engines=engines, **fields)
    made.start()
    made.settle()
    return made


def told(sim: Simulation) -> dict:
    assert sim.state.record is not None
    return summarize_status(sim.state, sim.state.record, WALL)


def test_a_status_holds_no_more_than_its_schema_allows():
    assert (KEPT_ENTRIES, KEPT_LINES) == (MAX_REFITS, MAX_LINES)


def test_refits_are_rows_of_a_history_the_newest_last():
    sim = started()
    sim.open_session()
    assert sim.run_refit(1, "r1").phase is Phase.COMPLETE
    sim.advance(5)
    assert sim.run_refit(2, "r2").phase is Phase.COMPLETE
    status = told(sim)
    first, second = WeightSyncStatus.model_validate(status).refits
    assert (first.refit, first.version, second.refit, second.version) == ("r1", 1, "r2", 2)
    assert (second.outcome, second.members, second.engines) == ("Complete", 2, 2)
    assert first.finished_at is not None
    assert second.started_at is not None
    assert first.finished_at < second.started_at
    assert first.finished_at.startswith("2030-01-01T00:")
    assert set(second.seconds) >= {"Forming", "Pausing", "Transferring", "Committing", "Resuming"}
    assert second.slowest


def test_a_sync_job_that_began_anew_keeps_the_history_and_the_last_refit_of_the_one_before():
    sim = started()
    sim.open_session()
    sim.run_refit(1, "r1")
    before = render_document(told(sim), READY, {}, 1, "now")
    fresh = {"version": 1, "epoch": 5}
    after = render_document(fresh, READY, before, 1, "later")
    assert after["refits"] == before["refits"]
    assert after["lastRefit"] == before["lastRefit"]
    again = render_document({**fresh, "refits": [*before["refits"], {"refit": "r2"}]}, READY, after, 1, "later")
    assert [entry["refit"] for entry in again["refits"]] == ["r1", "r2"]


def test_the_history_is_bounded_in_rows_and_in_bytes():
    many = [{"refit": str(number)} for number in range(50)]
    assert bound_history(many) == many[-KEPT_ENTRIES:]
    large = [{"refit": str(number), "message": "x" * 3000} for number in range(10)]
    kept = bound_history(large)
    assert kept[-1] is large[-1]
    assert 3000 < len(json.dumps(kept)) < HISTORY_BYTES + 100


def test_while_a_group_forms_the_status_names_who_is_missing_and_why():
    sim = started()
    sim.open_session()
    roster = sim.state.roster
    assert roster is not None
    gone = roster.members[1]
    short = Roster(fleet=roster.fleet, fleet_uid=roster.fleet_uid, engines=2, members=roster.members[:1])
    sim.request(1)
    from rolloutfleet_sync.protocol import events

    sim.apply(events.RosterChanged(short))
    status = told(sim)
    assert {"member": f"engine-{gone.engine}", "what": "has no pod"} in status["gaps"]
    assert status["refit"]["phase"] == "Forming"
    assert f"engine-{gone.engine}" in status["refit"]["waitingFor"]
    assert status["refit"]["startedAt"].startswith("2030-01-01T00:00:")
    WeightSyncStatus.model_validate(status)


def test_a_variable_that_differs_between_engines_is_told_before_any_refit():
    sim = started()
    sim.workers[0]._pod._environment["GLOO_SOCKET_TIMEOUT"] = "5"
    sim.advance(10)
    sim.settle()
    (gap,) = find_gaps(sim.state)
    assert "GLOO_SOCKET_TIMEOUT is '5' on" in gap.what
    assert "but unset on" in gap.what


def test_at_rest_with_every_engine_whole_nothing_is_amiss():
    sim = started()
    status = told(sim)
    assert not {"gaps", "behind", "refit", "refits"} & set(status)
