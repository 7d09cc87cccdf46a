"""Which weights the fleet serves: the highest epoch and version that any of its WeightSyncs ever reported."""

from collections.abc import Iterable

from rolloutfleet_operator.api.fleetstatus import Weights
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_operator.status.conditions import Event

REFIT_FAILED = "RefitFailed"


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
        asleep=members.asleep if members is not None else 0,
        last_refit=(active.last_refit if active is not None else None) or before.last_refit,
    )


def weights_events(previous: Weights | None, current: Weights) -> tuple[Event, ...]:
    """A warning for each refit that failed."""
    refit = current.last_refit
    if refit is None or refit.outcome != "Failed" or (previous is not None and previous.last_refit == refit):
        return ()
    where = f" while {refit.phase}" if refit.phase else ""
    who = f" at {refit.member}" if refit.member else ""
    return (Event(True, REFIT_FAILED, f"refit to version {refit.version} failed{where}{who}: {refit.message}"),)
