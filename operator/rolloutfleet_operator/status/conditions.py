"""Conditions and events from verdicts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rolloutfleet_operator.api.conditions import Condition, ConditionStatus, FleetCondition, Reason


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition should say now."""

    type: str
    status: ConditionStatus
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell people once."""

    warning: bool
    reason: str
    message: str


def timestamp(now: datetime) -> str:
    """RFC 3339 with whole seconds, as Kubernetes writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def fold_conditions(
    previous: Sequence[Condition], verdicts: Iterable[Verdict], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions to write, in order of type; the transition time moves only when a status flips."""
    known = {condition.type: condition for condition in previous}
    folded = []
    for verdict in sorted(verdicts, key=lambda v: v.type):
        before = known.get(verdict.type)
        flipped = before is None or before.status != verdict.status
        folded.append(
            Condition(
                type=verdict.type,
                status=verdict.status,
                observed_generation=generation,
                last_transition_time=timestamp(now) if before is None or flipped else before.last_transition_time,
                reason=verdict.reason.value,
                message=verdict.message,
            )
        )
    return tuple(folded)


def condition_events(previous: Sequence[Condition], current: Sequence[Condition]) -> tuple[Event, ...]:
    """An event for each condition whose status or reason changed; those that say the same thing are told once."""
    before = {condition.type: (condition.status, condition.reason) for condition in previous}
    told: dict[tuple[str, str], Event] = {}
    for condition in current:
        changed = before.get(condition.type) != (condition.status, condition.reason)
        if (
            changed
            and condition.type in (FleetCondition.READY, FleetCondition.STALLED)
            and condition.reason not in _QUIET
        ):
            warning = condition.type == FleetCondition.STALLED and condition.status == "True"
            key = (condition.reason, condition.message)
            told[key] = Event(warning or (key in told and told[key].warning), condition.reason, condition.message)
    return tuple(told.values())


_QUIET = frozenset({Reason.SETTLED, Reason.PROGRESSING, Reason.ENGINE_RETIRED})
"""A retirement has an event of its own for each engine."""
