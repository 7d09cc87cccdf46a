"""What the WeightSync's status, metrics and history tell of a state; what trainers are shown is in
:mod:`~rolloutfleet_sync.protocol.view`."""

import json
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rolloutfleet.contract.history import Gap, RefitAttempt, RefitEntry, RefitProgress
from rolloutfleet.contract.policy import Wire
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol.ledger import find_differences
from rolloutfleet_sync.protocol.losses import find_absent
from rolloutfleet_sync.protocol.members import is_admitted
from rolloutfleet_sync.protocol.model import Refit, State, Step
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.staleness import is_allowed_stale, serves
from rolloutfleet_sync.protocol.standing import judge_standing
from rolloutfleet_sync.protocol.view import describe_member, phase_of, summarize_result, waiting_for

TEXT_LENGTH: Final = 253
MESSAGE_LENGTH: Final = 2000
"""Limits of the status schema."""
ENTRY_MESSAGE_LENGTH: Final = 300
"""Of a message in the history, where many stand."""
KEPT_ENTRIES: Final = 20
HISTORY_BYTES: Final = 16 * 1024
KEPT_VERSIONS: Final = 8
KEPT_LINES: Final = 16
"""Gaps, engines that lag behind and names of those waited for: the first of them are listed, the counts tell of all."""

ENDLESS: Final = float("inf")
LINK_STATES: Final = frozenset({WorkerState.SERVING, WorkerState.PAUSED, WorkerState.DIRTY})

WallClock = Callable[[float], datetime]
"""The time of day at a moment of the state's own clock."""


def wall_clock(offset: float) -> WallClock:
    """The clock of a process whose own clock shows 0 at this Unix time."""
    return lambda moment: datetime.fromtimestamp(offset + moment, UTC)


EPOCH_CLOCK: Final = wall_clock(0.0)


def timestamp(moment: datetime) -> str:
    """RFC 3339 with milliseconds."""
    return f"{moment.strftime('%Y-%m-%dT%H:%M:%S')}.{moment.microsecond // 1000:03d}Z"


@dataclass(frozen=True, slots=True)
class Readiness:
    """The sync job's condition Ready, without the times that only the edge knows."""

    status: bool
    reason: str
    message: str


def judge_readiness(state: State) -> Readiness:
    """Whether trainers are answered, and which engines lag behind; the words change only when the facts do."""
    roster = state.roster
    if roster is None or state.record is None or state.reading:
        return Readiness(False, "Starting", "the sync job is reading the fleet's roster and status")
    if state.stopping:
        return Readiness(False, "Stopping", "the sync job is stopping")
    lagging = [f"engine {engine} has no pod" for engine in roster.missing]
    records = sorted(state.members.values(), key=lambda record: record.member.engine)
    lagging += [
        f"{record.pod_name}: {describe_member(state, record) or 'not admitted yet'}"
        for record in records
        if not is_admitted(record, state.version)
    ]
    admitted = len(records) - sum(not is_admitted(record, state.version) for record in records)
    message = f"{admitted} of {roster.engines} engines hold version {state.version}"
    asleep = _count_asleep(state)
    if asleep:
        message += f", {asleep} of them asleep" if asleep == admitted else f"; {asleep} asleep"
    if lagging:
        more = f"; and {len(lagging) - 4} more" if len(lagging) > 4 else ""
        message = f"{message}; {'; '.join(lagging[:4])}{more}"[:MESSAGE_LENGTH]
    return Readiness(True, "AnswersTrainers", message)


def _count_asleep(state: State) -> int:
    reports = (record.report for record in state.members.values())
    return sum(report is not None and report.state is WorkerState.ASLEEP for report in reports)


def count_versions(state: State) -> dict[str, Any]:
    """Engines by the version that they serve, while that is more than one; empty otherwise."""
    held = Counter(record.report.version for record in state.members.values() if record.report and serves(record))
    if len(held) < 2:
        return {}
    stale = sum(is_allowed_stale(state, record) for record in state.members.values())
    versions = [{"version": version, "engines": count} for version, count in sorted(held.items(), reverse=True)]
    return {"stale": stale, "oldestVersion": min(held), "versions": versions[:KEPT_VERSIONS]}


def find_gaps(state: State) -> list[Gap]:
    """Why the group is not whole: who is missing while one forms, and which variables differ between engines that are up."""
    gaps: list[Gap] = []
    refit = state.active
    if refit is not None and refit.phase not in {Phase.FORMING, Phase.REFORMING}:
        return gaps
    if refit is not None and refit.step is Step.GATHER:
        gaps += [Gap(member=member, what=why) for member, why, _ in find_absent(state, refit)]
    elif refit is not None:
        told = {Step.CHECK: "has not checked the manifest yet", Step.JOIN: "has not joined the group yet"}
        gaps += [
            Gap(member=name, what=told.get(refit.step, "has not answered yet")) for name in waiting_for(state, refit)
        ]
    reports = {
        record.pod_name: record.report
        for record in state.members.values()
        if record.report is not None and record.failure is None and record.report.state in LINK_STATES
    }
    on_cpus = all(device == "cpu" for report in reports.values() for device in report.devices)
    gaps += [
        Gap(what=difference)
        for difference in find_differences(
            {name: report.environment for name, report in reports.items()},
            {name: report.nccl_version for name, report in reports.items()},
            Wire.GLOO if on_cpus else Wire.NCCL,
        )
    ]
    return gaps


def show_progress(state: State, wall: WallClock) -> RefitProgress | None:
    """The refit under way, None at rest."""
    refit = state.active
    if refit is None:
        return None
    length = refit.deadline - refit.phase_started
    return RefitProgress(
        refit=refit.id,
        version=refit.version,
        epoch=refit.epoch,
        phase=refit.phase.value,
        attempt=refit.attempt,
        started_at=timestamp(wall(refit.phase_started)),
        deadline_seconds=round(length, 3) if length < ENDLESS else 0.0,
        waiting_for=tuple(name[:TEXT_LENGTH] for name in waiting_for(state, refit)[:KEPT_LINES]),
    )


def slowest_lag(refit: Refit) -> float:
    """How many seconds the last engine had the version after the one in the middle; 0 while there are fewer than two."""
    arrivals = refit.arrived.values()
    return max(arrivals) - statistics.median_low(arrivals) if len(refit.arrived) > 1 else 0.0


def tell_attempts(refit: Refit) -> tuple[RefitAttempt, ...]:
    """The attempts that lost a member, the first of them."""
    return tuple(
        RefitAttempt(
            epoch=attempt.epoch,
            lost=tuple(lost.pod_name[:TEXT_LENGTH] for lost in attempt.lost[:KEPT_LINES]),
            phase=attempt.lost[0].phase if attempt.lost else "",
            why=_shorten(attempt.lost[0].message, ENTRY_MESSAGE_LENGTH) if attempt.lost else "",
            seconds=round(sum(attempt.seconds.values()), 6),
        )
        for attempt in refit.ended[:KEPT_LINES]
    )


def tell_refit(refit: Refit, engines: int, wall: WallClock) -> RefitEntry:
    """A refit that has ended, as one row of the history."""
    result = summarize_result(refit)
    problem = refit.problem
    told: dict[str, Any] = {}
    if refit.choice is not None:
        told |= {"transport": refit.choice.transport.value, "staged": refit.staged}
    if refit.slowest:
        told |= {"slowest": refit.slowest[:TEXT_LENGTH], "slowest_lag_seconds": round(slowest_lag(refit), 6)}
    if problem is not None:
        told |= {
            "phase": problem.phase,
            "member": problem.member[:TEXT_LENGTH],
            "code": problem.code.value,
            "message": _shorten(problem.message, ENTRY_MESSAGE_LENGTH),
        }
    if refit.seconds:
        told["started_at"] = timestamp(wall(refit.started))
        told["finished_at"] = timestamp(wall(refit.phase_started))
    return RefitEntry(
        refit=refit.id[:TEXT_LENGTH],
        version=refit.version,
        epoch=refit.epoch,
        outcome=refit.phase.value,
        members=len(result.members) if refit.committed else len(refit.seats),
        engines=engines,
        missing=tuple(f"engine-{engine}" for engine in sorted(refit.absent)[:KEPT_LINES]),
        nbytes=refit.nbytes,
        seconds=_round(refit),
        pause_seconds=round(refit.pause_seconds, 6),
        gigabytes_per_second=round(result.gigabytes_per_second, 6) if refit.committed else 0.0,
        attempts=tell_attempts(refit),
        **told,
    )


def tell_history(state: State, wall: WallClock) -> list[RefitEntry]:
    """The refits that have ended, the newest last."""
    engines = state.roster.engines if state.roster else 0
    return [tell_refit(refit, engines, wall) for refit in state.finished[-KEPT_ENTRIES:]]


def bound_history(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest of these rows, at most :data:`KEPT_ENTRIES` and :data:`HISTORY_BYTES` of JSON."""
    kept: list[dict[str, Any]] = []
    left = HISTORY_BYTES
    for entry in reversed(entries[-KEPT_ENTRIES:]):
        left -= len(json.dumps(entry))
        if left < 0:
            break
        kept.insert(0, entry)
    return kept


def _round(refit: Refit) -> dict[str, float]:
    return {phase: round(seconds, 6) for phase, seconds in sorted(refit.seconds.items())}


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def summarize_status(state: State, record: Record, wall: WallClock = EPOCH_CLOCK) -> dict[str, Any]:
    """The WeightSync's status without its conditions; only what changes when something has happened."""
    admitted = sum(is_admitted(member, state.version) for member in state.members.values())
    status: dict[str, Any] = {
        "phase": phase_of(state).value,
        "epoch": max(record.epoch, state.epoch),
        "version": record.version,
        "members": {"total": state.roster.engines if state.roster else 0, "admitted": admitted},
    }
    asleep = _count_asleep(state)
    if asleep:
        status["members"]["asleep"] = asleep
    status["members"] |= count_versions(state)
    if record.held:
        status["held"] = record.held
    if record.intent is not None:
        status["intent"] = record.intent.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    session = state.session
    if session is not None:
        status["session"] = {"id": session.id, "trainer": session.request.trainer[:TEXT_LENGTH]}
        if session.request.world_size is not None:
            status["session"]["worldSize"] = session.request.world_size
    progress = show_progress(state, wall)
    if progress is not None:
        status["refit"] = progress.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    gaps = find_gaps(state)
    if gaps:
        status["gaps"] = [_gap(gap) for gap in gaps[:KEPT_LINES]]
    behind = _behind(state) if admitted < len(state.members) else []
    if behind:
        status["behind"] = behind
    if state.finished:
        status["lastRefit"] = _summarize_refit(state.finished[-1], wall)
        status["refits"] = bound_history(
            [entry.model_dump(mode="json", by_alias=True, exclude_defaults=True) for entry in tell_history(state, wall)]
        )
    return status


def _gap(gap: Gap) -> dict[str, str]:
    body = {"what": _shorten(gap.what, ENTRY_MESSAGE_LENGTH)}
    return body | {"member": gap.member[:TEXT_LENGTH]} if gap.member else body


def _behind(state: State) -> list[dict[str, Any]]:
    """The first engines that do not hold the committed version."""
    lines: list[dict[str, Any]] = []
    for record in sorted(state.members.values(), key=lambda record: record.member.engine):
        if is_admitted(record, state.version) or len(lines) == KEPT_LINES:
            continue
        report = record.report
        lines.append(
            {
                "member": record.pod_name[:TEXT_LENGTH],
                "engine": record.member.engine,
                "state": judge_standing(state, record),
                "version": report.version if report is not None else 0,
                "message": _shorten(describe_member(state, record) or "not admitted yet", ENTRY_MESSAGE_LENGTH),
            }
        )
    return lines


def _summarize_refit(refit: Refit, wall: WallClock) -> dict[str, Any]:
    result = summarize_result(refit)
    summary: dict[str, Any] = {
        "version": refit.version,
        "epoch": refit.epoch,
        "outcome": refit.phase.value,
        "members": len(result.members) if refit.committed else len(refit.seats),
        "tensors": refit.tensors,
        "nbytes": refit.nbytes,
        "digest": result.digest,
        "liveDigest": result.live_digest,
        "seconds": _round(refit),
        "pauseSeconds": round(refit.pause_seconds, 6),
        "gigabytesPerSecond": round(result.gigabytes_per_second, 6) if refit.committed else 0.0,
    }
    if refit.seconds:
        summary["finishedAt"] = timestamp(wall(refit.phase_started))
    if refit.choice is not None:
        summary |= {
            "transport": refit.choice.transport.value,
            "reason": refit.choice.reason[:MESSAGE_LENGTH],
            "staged": refit.staged,
            "detours": [sentence[:MESSAGE_LENGTH] for sentence in result.detours],
            "slowest": refit.slowest[:TEXT_LENGTH],
        }
        if len(refit.arrived) > 1:
            summary["slowestLagSeconds"] = round(slowest_lag(refit), 6)
    if refit.ended:
        summary["attempts"] = [
            attempt.model_dump(mode="json", by_alias=True, exclude_defaults=True) for attempt in tell_attempts(refit)
        ]
    problem = refit.problem
    if problem is not None:
        summary |= {
            "phase": problem.phase,
            "member": problem.member[:TEXT_LENGTH],
            "code": problem.code.value,
            "message": problem.message[:MESSAGE_LENGTH],
        }
    return summary
