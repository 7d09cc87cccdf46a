"""What the operator tells of refits and of engines that lag behind, and how seldom."""

from rolloutfleet_operator.api.fleetstatus import Weights
from rolloutfleet_operator.api.history import AttemptSummary, Laggard
from rolloutfleet_operator.api.weightsync import LastRefit, MemberCounts, WeightSyncStatus
from rolloutfleet_operator.status.weights import fold_weights, weights_events


def refit(version: int, at: str, **fields) -> LastRefit:
    common = {"outcome": "Complete", "members": 4, "transport": "Layout", "reason": "Layout over NCCL: quick"}
    return LastRefit(version=version, finished_at=f"2030-01-01T{at}Z", **(common | fields))


def reasons(before: Weights | None, after: Weights) -> list[str]:
    return [event.reason for event in weights_events(before, after)]


def test_of_refits_that_complete_the_first_of_each_minute_is_told():
    told = []
    before = Weights(last_refit=refit(1, "00:00:00.000"))
    for second in range(1, 180):
        after = Weights(last_refit=refit(1 + second, f"00:{second // 60:02d}:{second % 60:02d}.500"))
        told += reasons(before, after)
        before = after
    assert told == ["RefitComplete", "RefitComplete"]


def test_a_refit_that_completes_is_told_with_its_engines_seconds_and_pause():
    last = refit(7, "00:00:00.000", seconds={"Forming": 0.5, "Transferring": 1.0}, pause_seconds=0.0125)
    events = weights_events(None, Weights(last_refit=last))
    assert [(event.warning, event.reason) for event in events] == [(False, "TransportChosen"), (False, "RefitComplete")]
    assert events[0].message == "weights travel by Layout over NCCL: quick"
    assert events[1].message.startswith("version 7 is published on 4 engines in 1.50 s, paused 0.013 s")


def test_another_transport_is_told_once():
    first, second = refit(1, "00:00:00.0"), refit(2, "00:00:01.0", transport="Colocated", reason="Colocated: shared")
    assert reasons(Weights(last_refit=first), Weights(last_refit=second)) == ["TransportChosen"]
    third = refit(3, "00:00:02.0", transport="Colocated", reason="Colocated: shared")
    assert reasons(Weights(last_refit=second), Weights(last_refit=third)) == []


def test_a_refit_that_went_on_without_engines_names_them():
    attempts = (AttemptSummary(epoch=2, lost=("f-1-0-0",), phase="Transferring"),)
    before = Weights(last_refit=refit(1, "00:00:00.0"))
    (event,) = weights_events(before, Weights(last_refit=refit(2, "00:00:01.0", attempts=attempts)))
    assert (event.warning, event.reason) == (True, "RefitReformed")
    assert event.message == "refit to version 2 went on without f-1-0-0"


def test_engines_that_become_late_or_dirty_are_told_together_and_once():
    late = [Laggard(member=f"f-{n}-0-1", engine=n, state="Late", message="holds version 0") for n in range(6)]
    dirty = Laggard(member="f-9-0-0", engine=9, state="Dirty", message="part of version 8")
    before, after = Weights(version=7), Weights(version=7, behind=(*late, dirty))
    events = weights_events(before, after)
    assert [(event.warning, event.reason) for event in events] == [(True, "EngineDirty"), (False, "EngineLate")]
    assert events[1].message.startswith("f-0-0-1, f-1-0-1, f-2-0-1, f-3-0-1 and 2 more came up without version 7")
    assert weights_events(after, after) == ()
    worse = Weights(version=7, behind=(late[0].model_copy(update={"state": "Dirty"}),))
    assert reasons(after, worse) == ["EngineDirty"]


def test_engines_that_start_with_the_fleet_or_are_stale_by_leave_are_not_told():
    late = Laggard(member="f-0-0-0", engine=0, state="Late", message="not admitted yet")
    assert reasons(Weights(), Weights(version=0, behind=(late,))) == []
    stale = late.model_copy(update={"state": "Stale"})
    assert reasons(Weights(version=7), Weights(version=7, behind=(stale,))) == []


def test_an_engine_that_was_seen_starting_is_told_as_late_once_it_is_up_and_a_stale_one_never():
    engine = Laggard(member="f-0-0-1", engine=0, state="Starting")
    up = engine.model_copy(update={"state": "Late"})
    assert reasons(Weights(version=7, behind=(engine,)), Weights(version=7, behind=(up,))) == ["EngineLate"]
    for before in ("Silent", "Dirty", "Receiving", "Stale"):
        was = engine.model_copy(update={"state": before})
        assert reasons(Weights(version=7, behind=(was,)), Weights(version=7, behind=(up,))) == []


def test_an_engine_whose_time_is_over_is_told_by_name_as_a_warning():
    stale = Laggard(member="f-0-0-0", engine=0, state="Stale", version=6)
    overdue = stale.model_copy(update={"state": "Overdue", "message": "Stale: holds version 6"})
    (event,) = weights_events(Weights(version=7, behind=(stale,)), Weights(version=7, behind=(overdue,)))
    assert (event.warning, event.reason) == (True, "EngineOverdue")
    assert event.message == "f-0-0-0 may not serve an older version any longer: Stale: holds version 6"


def test_a_fleet_s_status_counts_those_that_serve_an_older_version_by_leave():
    report = WeightSyncStatus(version=7, members=MemberCounts(total=4, admitted=1, stale=2))
    weights = fold_weights(None, [report], report)
    assert (weights.skew, weights.stale) == (3, 2)


def test_a_fleet_s_status_names_the_engines_behind_of_its_active_weightsync():
    lag = Laggard(member="f-0-0-0", engine=0, state="Dirty", message="part of version 8")
    report = WeightSyncStatus(version=7, behind=(lag,))
    assert fold_weights(None, [report], report).behind == (lag,)
    assert fold_weights(None, [report], None).behind == ()
