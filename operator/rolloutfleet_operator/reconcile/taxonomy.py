"""The error taxonomy as one table: what an error does to the conditions, and when the pass is tried again."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet_operator.api.conditions import Reason
from rolloutfleet_operator.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BlockedError,
    ConflictError,
    InvalidSpecError,
    NotFoundError,
    OperatorError,
    OwnershipConflictError,
    RefusedError,
    TransientError,
)

BACKOFF_CAP_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Treatment:
    """``reason`` is None for errors that only time tells; they are reported from the ``report_after``-th pass in a row on."""

    reason: Reason | None
    stalled: bool
    requeue_seconds: float | None
    """None waits for the object to change; 0 means exponential back-off."""
    report_after: int = 1


TREATMENTS: tuple[tuple[type[OperatorError], Treatment], ...] = (
    (InvalidSpecError, Treatment(Reason.INVALID_SPEC, stalled=True, requeue_seconds=None)),
    (OwnershipConflictError, Treatment(Reason.OWNERSHIP_CONFLICT, stalled=True, requeue_seconds=300)),
    (RefusedError, Treatment(Reason.REFUSED, stalled=True, requeue_seconds=60)),
    (AccessDeniedError, Treatment(Reason.ACCESS_DENIED, stalled=True, requeue_seconds=60)),
    (BlockedError, Treatment(Reason.BLOCKED, stalled=False, requeue_seconds=15)),
    (TransientError, Treatment(Reason.API_UNAVAILABLE, stalled=False, requeue_seconds=0, report_after=3)),
    (ConflictError, Treatment(None, stalled=False, requeue_seconds=2)),
    (AlreadyExistsError, Treatment(None, stalled=False, requeue_seconds=2)),
    (NotFoundError, Treatment(None, stalled=False, requeue_seconds=2)),
)
"""Gravest first: of several errors in one pass, the one that stands first here is told."""

FAULT = Treatment(Reason.INTERNAL_ERROR, stalled=True, requeue_seconds=0)
"""Everything that the operator did not raise on purpose."""


def treatment_of(error: Exception) -> Treatment:
    """How to treat an error."""
    return next((treatment for kind, treatment in TREATMENTS if isinstance(error, kind)), FAULT)


def gravest(errors: Sequence[OperatorError]) -> OperatorError:
    """The error that decides a pass with several."""
    order = {kind: position for position, (kind, _) in enumerate(TREATMENTS)}
    return min(errors, key=lambda error: (order.get(type(error), -1), error.message))


def requeue_after(error: Exception, failures: int, jitter: float) -> float | None:
    """Seconds until the next pass, None to wait for a change.

    Args:
        error: what ended the pass.
        failures: passes that failed in a row, this one counted.
        jitter: a number from 0 to 1.
    """
    treatment = treatment_of(error)
    if isinstance(error, TransientError) and error.retry_after is not None:
        return min(error.retry_after, BACKOFF_CAP_SECONDS) + jitter
    if treatment.requeue_seconds == 0:
        return float(min(BACKOFF_CAP_SECONDS, 2.0 ** min(failures, 16)) * (0.5 + jitter / 2))
    return treatment.requeue_seconds
