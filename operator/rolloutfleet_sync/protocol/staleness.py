"""Engines that may serve, for a while, a version that is not the fleet's newest.

With ``refit.strategy: Rolling`` an engine that served when a version was published serves the one before until it has taken the new one
over, at most ``maxStaleSeconds`` long. What it may do it is told with ``admit``, and it keeps the end by itself. The sync job remembers no
more than when it saw which version become the fleet's: an engine that was told says how much time it has left, and is never given more.

An engine is taken out of service only while fewer than ``maxUnavailable`` are, for whatever reason; once half of ``maxStaleSeconds`` has
passed, one at a time, since fencing all that are stale would be worse.
"""

from rolloutfleet.contract.policy import Strategy
from rolloutfleet.contract.worker import WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.model import MemberRecord, State, Verb

KEPT_PUBLICATIONS = 8
IN_BETWEEN = frozenset({WorkerState.PAUSED, WorkerState.RECEIVING, WorkerState.RECEIVED})
"""States from which an engine comes back with the new version, or with none."""


def rolls(state: State) -> bool:
    """Whether versions go through this fleet in waves."""
    return state.policy.strategy is Strategy.ROLLING


def note_publication(draft: Draft, before: State) -> None:
    """Note when the fleet's version rose; a sync job that has just started does not know when that was."""
    version = draft.state.version
    if before.record is not None and version > before.version:
        draft.change(published=(*draft.state.published, (version, draft.now))[-KEPT_PUBLICATIONS:])


def serves(record: MemberRecord) -> bool:
    """Whether the engine generates for the fleet's users, by its own last word."""
    report = record.report
    return record.failure is None and report is not None and report.state is WorkerState.SERVING and not report.message


def is_stale(state: State, record: MemberRecord) -> bool:
    """Whether the engine serves, and what it serves is not the newest version."""
    return serves(record) and record.report is not None and record.report.version < state.version


def is_allowed_stale(state: State, record: MemberRecord) -> bool:
    """Whether the engine serves an older version and has been told until when."""
    return is_stale(state, record) and record.report is not None and bool(record.report.stale_seconds)


def known_end(state: State, version: int) -> float | None:
    """When an engine that holds this version must have stopped serving it, as far as this sync job has seen it become old."""
    newer = [at for published, at in state.published if published > version]
    return min(newer) + state.policy.rolling.max_stale_seconds if newer else None


def time_left(state: State, report: WorkerReport, now: float) -> float:
    """Seconds for which an engine may still serve the older version that it holds; never more than it knows of itself."""
    end, told = known_end(state, report.version), report.stale_seconds
    if end is not None:
        return end - now if told is None else min(end - now, told)
    if told is None:
        return 0.0  # nobody knows for how long it has been old already
    return told if report.admitted == state.version else told - announced_seconds(state)


def announced_seconds(state: State) -> float:
    """By how much what a refit announces is longer than ``maxStaleSeconds``: until its commit it may take as long as this."""
    deadlines = state.policy.deadlines
    return float(
        deadlines.pausing_seconds
        + deadlines.transferring_seconds
        + deadlines.verifying_seconds
        + 2 * deadlines.committing_seconds
    )


def stale_seconds(state: State, report: WorkerReport, now: float) -> float | None:
    """How much longer to tell this engine that it may serve what it holds, which is not the newest version; None for not at all."""
    served = report.admitted == report.version and report.stale_seconds is None
    if not rolls(state) or report.version >= state.version or not (served or report.stale_seconds):
        return None
    left = time_left(state, report, now)
    return left if left > 0 else None


def is_told(state: State, report: WorkerReport) -> bool:
    """Whether the engine knows the newest version, and has no permission that it does not need any more."""
    return report.admitted == state.version and not (
        report.version == state.version and report.stale_seconds is not None
    )


def count_unavailable(state: State) -> int:
    """Engines of the fleet that do not serve now, whatever the reason, or are about to stop."""
    engines = state.roster.engines if state.roster is not None else 0
    serving = sum(serves(record) and not _is_leaving_service(state, record) for record in state.members.values())
    return max(engines - serving, 0)


def _is_leaving_service(state: State, record: MemberRecord) -> bool:
    """Whether a loan in place is under way for an engine that serves, or ended after its last report; or it is told to pause."""
    loan = state.loans.get(record.member.pod_uid)
    if loan is not None and not loan.staged and (loan.donor or record.reported_by < loan.known_after):
        return True
    call = state.calls.get(record.call) if record.call is not None else None
    return call is not None and call.verb is Verb.PAUSE


def may_take_out(state: State, now: float) -> bool:
    """Whether an engine that serves may be taken out of service for the roll's sake."""
    if count_unavailable(state) < state.policy.rolling.max_unavailable:
        return True
    half = state.policy.rolling.max_stale_seconds / 2
    overdue = any(
        is_stale(state, record) and record.report is not None and time_left(state, record.report, now) <= half
        for record in state.members.values()
    )
    return overdue and not any(_is_out_for_the_roll(state, record) for record in state.members.values())


def _is_out_for_the_roll(state: State, record: MemberRecord) -> bool:
    between = record.failure is None and record.report is not None and record.report.state in IN_BETWEEN
    return between or _is_leaving_service(state, record)
