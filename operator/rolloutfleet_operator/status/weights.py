"""Which weights the fleet serves: the highest epoch and version that any of its WeightSyncs ever reported."""

from collections.abc import Iterable, Sequence

from rolloutfleet.contract.history import Standing
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_operator.api.fleetstatus import Weights
from rolloutfleet_operator.api.weightsync import LastRefit, WeightSyncStatus
from rolloutfleet_operator.status.conditions import Event

REFIT_COMPLETE = "RefitComplete"
REFIT_FAILED = "RefitFailed"
REFIT_REFORMED = "RefitReformed"
TRANSPORT_CHOSEN = "TransportChosen"
ENGINE_DIRTY = "EngineDirty"
ENGINE_LATE = "EngineLate"
ENGINE_OVERDUE = "EngineOverdue"

LATE = frozenset({Standing.LATE.value, WorkerState.PAUSED.value})
"""States of an engine that lags behind although it is whole."""
COMING_UP = frozenset({None, WorkerState.STARTING.value})
"""States, or none, of an engine that has not been up; what is whole comes back from others without news."""


def fold_weights(
    previous: Weights | None, reports: Iterable[WeightSyncStatus], active: WeightSyncStatus | None
) -> Weights:
    """The weights to report. Epoch and version never fall, whichever WeightSync is deleted; the rest is the active one's word."""
    reports = list(reports)
    before = previous or Weights()
    epochs = [report.epoch for report in reports] + [report.intent.epoch for report in reports if report.intent]
    epoch = max([before.epoch, *epochs])
    version = max([before.version, *(report.version for report in reports)])
    intent = active.intent if active is not None else None
    members = active.members if active is not None else None
    return Weights(
        epoch=epoch,
        version=version,
        target=max(version, intent.version) if intent is not None else version,
        skew=max(0, members.total - members.admitted) if members is not None else 0,
        stale=members.stale if members is not None else 0,
        asleep=members.asleep if members is not None else 0,
        behind=active.behind if active is not None else (),
        last_refit=(active.last_refit if active is not None else None) or before.last_refit,
    )


def weights_events(previous: Weights | None, current: Weights) -> tuple[Event, ...]:
    """What to tell of refits and of engines that lag behind.

    A failed refit is told each time. Of those that complete, the first of each minute is told, so that a trainer that refits every second
    does not drown what else happens; the history in the WeightSync's status has them all.
    """
    before = previous or Weights()
    return (*_refit_events(before.last_refit, current.last_refit), *_laggard_events(before, current))


def _refit_events(before: LastRefit | None, refit: LastRefit | None) -> Iterable[Event]:
    if refit is None or refit == before:
        return
    if refit.outcome == "Failed":
        where = f" while {refit.phase}" if refit.phase else ""
        who = f" at {refit.member}" if refit.member else ""
        yield Event(True, REFIT_FAILED, f"refit to version {refit.version} failed{where}{who}: {refit.message}")
        return
    known = before is not None and bool(before.transport)
    if refit.transport and not (known and before is not None and before.transport == refit.transport):
        yield Event(False, TRANSPORT_CHOSEN, f"weights travel by {refit.reason or refit.transport}")
    lost = sorted({pod for attempt in refit.attempts for pod in attempt.lost})
    if lost:
        yield Event(True, REFIT_REFORMED, f"refit to version {refit.version} went on without {_name_some(lost)}")
    if before is None or _minute(before) != _minute(refit):
        yield Event(
            False,
            REFIT_COMPLETE,
            f"version {refit.version} is published on {refit.members} engines in {sum(refit.seconds.values()):.2f} s, "
            f"paused {refit.pause_seconds:.3f} s; at most one such event is told in a minute",
        )


def _minute(refit: LastRefit) -> str:
    return (refit.finished_at or "")[:16]


def _laggard_events(before: Weights, current: Weights) -> Iterable[Event]:
    """Engines that have become dirty, or overdue, or have come up without the version; at version 0 every engine comes up like that."""
    known = {laggard.member: laggard.state for laggard in before.behind}
    changed = [laggard for laggard in current.behind if known.get(laggard.member) != laggard.state]
    dirty = [laggard for laggard in changed if laggard.state == WorkerState.DIRTY]
    overdue = [laggard for laggard in changed if laggard.state == Standing.OVERDUE]
    late = [laggard for laggard in changed if laggard.state in LATE and known.get(laggard.member) in COMING_UP]
    if dirty:
        names = _name_some([laggard.member for laggard in dirty])
        yield Event(True, ENGINE_DIRTY, f"{names} took part of a version and refuses to generate: {dirty[0].message}")
    if overdue:
        names = _name_some([laggard.member for laggard in overdue])
        yield Event(True, ENGINE_OVERDUE, f"{names} may not serve an older version any longer: {overdue[0].message}")
    if late and current.version:
        names = _name_some([laggard.member for laggard in late])
        yield Event(False, ENGINE_LATE, f"{names} came up without version {current.version}: {late[0].message}")


def _name_some(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
