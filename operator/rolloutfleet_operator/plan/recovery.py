"""Which engines have failed too often, and which nodes are to be avoided.

Nothing is remembered but what the fleet's status holds, so an operator that begins anew goes on counting where the last one left off. A
failure is a restart of an engine's container, or the end of its pod for a reason of its own; a pod that is evicted, preempted or drained
has not failed. A pod's restarts tell of times long past, too: of several that nobody saw one by one, only the last counts unless the pod
is younger than the window.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rolloutfleet.contract.revival import parse_revival
from rolloutfleet_operator.api.recovery import (
    MAX_ENGINE_RECORDS,
    MAX_QUARANTINED,
    CountedPod,
    EngineRecord,
    Failure,
    QuarantinedNode,
    RecoverySpec,
    RecoveryStatus,
)
from rolloutfleet_operator.plan.observed import Pod

WORDS_LENGTH = 512
MAX_COUNTED = 16


@dataclass(frozen=True, slots=True)
class RecoveryGoal:
    """What failures are judged by."""

    spec: RecoverySpec
    engines: int
    revision: str
    """Failures of pods of another revision say nothing of this one."""
    revive: str = ""
    """The value of the fleet's annotation; a new one forgets every failure, or those of the engines that it names."""


def plan_recovery(goal: RecoveryGoal, previous: RecoveryStatus, own: Sequence[Pod], now: datetime) -> RecoveryStatus:
    """The records as they should stand now: failures counted, engines retired or revived, nodes avoided or used again."""
    revived = parse_revival(goal.revive) if goal.revive and goal.revive != previous.revived else frozenset[int]()
    known = {
        record.engine: record for record in previous.engines if revived is not None and record.engine not in revived
    }
    records = [_record(goal, engine, known.get(engine), own, now) for engine in range(goal.engines)]
    serving = {pod.node for pod in own if pod.live and pod.ready and pod.revision == goal.revision}
    nodes = () if revived is None else _still_quarantined(previous.quarantined_nodes, now)
    nodes, kept = _quarantine(goal.spec, nodes, [record for record in records if record is not None], serving, now)
    worst = sorted(kept, key=lambda record: (not record.retired, -len(record.failures), record.engine))
    return RecoveryStatus(
        engines=tuple(sorted(worst[:MAX_ENGINE_RECORDS], key=lambda record: record.engine)),
        quarantined_nodes=nodes,
        revived=goal.revive or previous.revived,
    )


def due_in(status: RecoveryStatus, now: datetime) -> float | None:
    """Seconds until a node is used again; None when none is avoided."""
    return min((max(0.0, (_time(node.until) - now).total_seconds()) for node in status.quarantined_nodes), default=None)


def _record(
    goal: RecoveryGoal, engine: int, before: EngineRecord | None, own: Iterable[Pod], now: datetime
) -> EngineRecord | None:
    """The engine's record, None when there is nothing to remember."""
    if before is None or before.revision != goal.revision:
        before = EngineRecord(engine=engine, revision=goal.revision)
    counted = {pod.uid: pod.failures for pod in before.counted}
    pods = sorted(
        (pod for pod in own if pod.engine == engine and pod.revision == goal.revision),
        key=lambda pod: (pod.incarnation, pod.name),
    )
    begin = now - timedelta(seconds=goal.spec.window_seconds)
    new = [failure for pod in pods for failure in _new_failures(pod, counted.get(pod.uid, 0), begin, now)]
    if not before.retired:
        before = before.model_copy(update={"failures": tuple(f for f in before.failures if _time(f.at) > begin)})
    # The budget is the most that anybody asks for; one failure more says all.
    failures = tuple(sorted((*before.failures, *new), key=lambda f: f.at))[-(goal.spec.restart_budget + 1) :]
    if not failures:
        return None
    spent = len(failures) > goal.spec.restart_budget
    well = any(pod.live and pod.ready for pod in pods)
    failing = [pod for pod in pods if _failures_of(pod)]
    return EngineRecord(
        engine=engine,
        revision=goal.revision,
        # One that is merely not Ready, as in a refit, has not failed again.
        retired=spent and (before.retired or (bool(new) and not well)),
        message=_words(failing[-1]) if failing else before.message,
        failures=failures,
        counted=tuple(
            CountedPod(uid=pod.uid, failures=max(_failures_of(pod), counted.get(pod.uid, 0)))
            for pod in failing[-MAX_COUNTED:]
        ),
    )


def _failures_of(pod: Pod) -> int:
    return pod.container.restarts + (1 if pod.dead and not pod.disrupted else 0)


def _new_failures(pod: Pod, counted: int, begin: datetime, now: datetime) -> list[Failure]:
    """Failures of the pod that are within the window and were not counted yet."""
    new = _failures_of(pod) - counted
    last = min(pod.container.ended_at or now, now)
    # What a pod on its way out did was counted while it was here; a revived engine does not answer for it again.
    if pod.terminating or new <= 0 or last <= begin:
        return []
    if pod.created <= begin:
        new = 1
    return [Failure(at=_stamp(last), node=pod.node)] * new


def _words(pod: Pod) -> str:
    state = pod.container
    words = state.exit_message or state.exit_reason or f"exit code {state.exit_code}"
    return f"pod {pod.name}: {words}"[-WORDS_LENGTH:]


def _still_quarantined(nodes: Iterable[QuarantinedNode], now: datetime) -> tuple[QuarantinedNode, ...]:
    return tuple(node for node in nodes if _time(node.until) > now)


def _quarantine(
    spec: RecoverySpec,
    nodes: tuple[QuarantinedNode, ...],
    records: Sequence[EngineRecord],
    serving: set[str],
    now: datetime,
) -> tuple[tuple[QuarantinedNode, ...], list[EngineRecord]]:
    """The nodes to avoid, and the records without the failures that a node is avoided for already.

    A fault of the spec fails everywhere. So a node is blamed only while the same revision serves on another one.
    """
    limit = spec.quarantine_nodes.after_failures
    count = Counter(failure.node for record in records for failure in record.failures if failure.node)
    until = _stamp(now + timedelta(seconds=spec.quarantine_nodes.seconds))
    avoided = {node.node for node in nodes}
    bad = sorted(
        node
        for node, failures in count.items()
        if limit and failures >= limit and node not in avoided and serving - avoided - {node}
    )[: max(0, MAX_QUARANTINED - len(nodes))]
    added = tuple(QuarantinedNode(node=node, until=until, failures=count[node]) for node in bad)
    blamed = set(bad)
    kept = [
        record.model_copy(
            update={"failures": tuple(Failure(at=f.at) if f.node in blamed else f for f in record.failures)}
        )
        for record in records
    ]
    return tuple(sorted((*nodes, *added), key=lambda node: node.node)), kept


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
