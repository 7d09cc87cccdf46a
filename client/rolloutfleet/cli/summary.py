"""What a terminal shows of a fleet, taken from its objects; the time is passed in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rolloutfleet.cli.cluster import FleetObjects, Object
from rolloutfleet.contract.history import Gap, RefitAttempt, RefitProgress
from rolloutfleet.contract.names import GROUP
from rolloutfleet.contract.trainer import Phase

PHASES = tuple(phase.value for phase in Phase)


@dataclass(frozen=True, slots=True)
class ConditionLine:
    """One condition."""

    type: str
    status: str
    reason: str
    message: str
    age: str

    @property
    def good(self) -> bool:
        """Whether this is how it should be; Reconciling and Stalled are good when False."""
        return (self.status == "False") if self.type in {"Reconciling", "Stalled"} else (self.status == "True")


@dataclass(frozen=True, slots=True)
class PodLine:
    """One pod of an engine, or one that does something else for the fleet."""

    engine: str
    """Its number; empty for a pod of no engine."""
    role: str
    """What a pod of no engine is: ``sync``, ``checkpoint``, ``repair``, or what its label says."""
    pod: str
    node: str
    ready: bool
    state: str
    restarts: int
    age: str
    version: str = ""
    """What it holds; empty for what is no engine, or while nobody has said so."""
    problem: str = ""
    """Why it does not hold the committed version."""


@dataclass(frozen=True, slots=True)
class RefitLine:
    """How the last refit went."""

    outcome: str
    version: int
    epoch: int
    age: str
    members: int
    tensors: int
    gigabytes: float
    gigabytes_per_second: float
    pause_seconds: float
    seconds: tuple[tuple[str, float], ...]
    """Phases in their order with their wall seconds."""
    blame: str
    """For a failed one: phase, member and message."""
    transport: str
    reason: str
    """Why this transport, and why nothing was staged."""
    staged: bool
    detours: tuple[str, ...]
    """What went through vLLM's loader."""
    slowest: str
    slowest_lag_seconds: float
    attempts: tuple[RefitAttempt, ...]


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Everything that is shown of one fleet."""

    name: str
    namespace: str
    model: str
    age: str
    wanted: int
    ready: int
    version: int
    target: int
    epoch: int
    skew: int
    stale: int
    conditions: tuple[ConditionLine, ...]
    phase: str
    trainer: str
    engines: tuple[PodLine, ...]
    others: tuple[PodLine, ...]
    pods_visible: bool
    last_refit: RefitLine | None
    generation: str
    sync: str
    progress: RefitProgress | None = None
    gaps: tuple[Gap, ...] = ()

    @property
    def ready_condition(self) -> ConditionLine | None:
        """The condition Ready, once the operator has written it."""
        return next((condition for condition in self.conditions if condition.type == "Ready"), None)


def summarize_fleet(objects: FleetObjects, now: datetime) -> FleetSummary:
    """The summary of one fleet."""
    fleet, status = objects.fleet, objects.fleet.get("status") or {}
    weights, endpoints = status.get("weights") or {}, status.get("endpoints") or {}
    sync = _active_status(objects.weight_syncs)
    pods = objects.pods or ()
    behind = {line["member"]: line for line in sync.get("behind") or ()}
    counted = sync.get("members") or {}
    # The list is bounded: with more engines behind than it holds, only those on it are known.
    whole = counted.get("total", 0) - counted.get("admitted", 0) <= len(behind)
    committed = str(sync.get("version", 0)) if counted and whole else ""
    return FleetSummary(
        name=fleet["metadata"]["name"],
        namespace=fleet["metadata"]["namespace"],
        model=fleet["spec"]["model"]["name"],
        age=show_age(fleet["metadata"].get("creationTimestamp"), now),
        wanted=0 if fleet["spec"].get("suspend") else fleet["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", 0),
        version=weights.get("version", 0),
        target=weights.get("target", weights.get("version", 0)),
        epoch=weights.get("epoch", 0),
        skew=weights.get("skew", 0),
        stale=weights.get("stale", 0),
        conditions=tuple(_condition(condition, now) for condition in status.get("conditions", [])),
        phase=sync.get("phase") or "",
        trainer=(sync.get("session") or {}).get("trainer", ""),
        engines=tuple(
            sorted(
                (_with_weights(_pod(pod, now), behind, committed) for pod in pods if _engine(pod) is not None),
                key=_engine_order,
            )
        ),
        others=tuple(
            sorted((_pod(pod, now) for pod in pods if _engine(pod) is None), key=lambda line: (line.role, line.pod))
        ),
        pods_visible=objects.pods is not None,
        last_refit=_refit(sync.get("lastRefit") or weights.get("lastRefit"), now),
        generation=endpoints.get("generation", ""),
        sync=endpoints.get("sync", ""),
        progress=RefitProgress.model_validate(sync["refit"]) if sync.get("refit") else None,
        gaps=tuple(Gap.model_validate(gap) for gap in sync.get("gaps") or ()),
    )


def _with_weights(line: PodLine, behind: Mapping[str, Mapping[str, Any]], committed: str) -> PodLine:
    """The line with what the sync job says of the engine's weights."""
    lag = behind.get(line.pod)
    if lag is None:
        return replace(line, version=committed if line.ready else "")
    said = f"{lag.get('state', '')}: {lag.get('message', '')}"
    return replace(line, version=str(lag.get("version", 0)), problem=said.strip(": "))


def show_age(since: str | None, now: datetime) -> str:
    """Time since an RFC 3339 instant as kubectl shows it, such as ``3d`` or ``5m12s``."""
    if not since:
        return "-"
    seconds = max(int((now - datetime.fromisoformat(since)).total_seconds()), 0)
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 600:
        return f"{seconds // 60}m{seconds % 60}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h" if seconds < 172800 else f"{seconds // 86400}d"


def _active_status(syncs: Iterable[Object]) -> Mapping[str, Any]:
    statuses = [sync.get("status") or {} for sync in syncs]
    active = [
        status
        for status in statuses
        if any(
            condition["type"] == "Active" and condition["status"] == "True"
            for condition in status.get("conditions", [])
        )
    ]
    return (active or statuses or [{}])[0]


def _condition(condition: Mapping[str, Any], now: datetime) -> ConditionLine:
    return ConditionLine(
        type=condition["type"],
        status=condition["status"],
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        age=show_age(condition.get("lastTransitionTime"), now),
    )


def _engine(pod: Object) -> str | None:
    engine = pod["metadata"]["labels"].get(f"{GROUP}/engine")
    return None if engine is None else str(engine)


def _role(pod: Object) -> str:
    """A repair's Job and a checkpoint's carry one label; only their names tell them apart."""
    labels = pod["metadata"]["labels"]
    role = str(labels.get(f"{GROUP}/role", ""))
    repairs = pod["metadata"]["name"].startswith(f"{labels.get(f'{GROUP}/fleet')}-repair-")
    return "repair" if role == "checkpoint" and repairs else role or "-"


def _engine_order(line: PodLine) -> tuple[int, str]:
    return (int(line.engine) if line.engine.isdecimal() else 0, line.pod)


def _pod(pod: Object, now: datetime) -> PodLine:
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    conditions = status.get("conditions") or []
    return PodLine(
        engine=_engine(pod) or "",
        role="" if _engine(pod) is not None else _role(pod),
        pod=pod["metadata"]["name"],
        node=(pod.get("spec") or {}).get("nodeName") or "-",
        ready=any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions),
        state=_state(pod, status, containers, conditions),
        restarts=sum(container.get("restartCount", 0) for container in containers),
        age=show_age(pod["metadata"].get("creationTimestamp"), now),
    )


def _state(
    pod: Object,
    status: Mapping[str, Any],
    containers: list[Mapping[str, Any]],
    conditions: list[Mapping[str, Any]],
) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    states = [container.get("state") or {} for container in containers]
    waiting = [(state.get("waiting") or state.get("terminated") or {}).get("reason") for state in states]
    unscheduled = [
        condition.get("reason")
        for condition in conditions
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
    reasons = [reason for reason in [*waiting, *unscheduled] if reason]
    return str(reasons[0]) if reasons else str(status.get("reason") or status.get("phase") or "Unknown")


def _refit(refit: Mapping[str, Any] | None, now: datetime) -> RefitLine | None:
    if not refit:
        return None
    seconds = refit.get("seconds") or {}
    known = [phase for phase in PHASES if phase in seconds]
    order = [*known, *sorted(set(seconds) - set(known))]
    where = [f"in phase {refit['phase']}"] if refit.get("phase") else []
    where += [f"at {refit['member']}"] if refit.get("member") else []
    where += [f"({refit['code']})"] if refit.get("code") else []
    return RefitLine(
        outcome=refit.get("outcome", ""),
        version=refit.get("version", 0),
        epoch=refit.get("epoch", 0),
        age=show_age(refit.get("finishedAt"), now),
        members=refit.get("members", 0),
        tensors=refit.get("tensors", 0),
        gigabytes=refit.get("nbytes", 0) / 1e9,
        gigabytes_per_second=refit.get("gigabytesPerSecond", 0.0),
        pause_seconds=refit.get("pauseSeconds", 0.0),
        seconds=tuple((phase, float(seconds[phase])) for phase in order),
        blame=f"{' '.join(where)}: {refit['message']}".lstrip(": ") if refit.get("message") else "",
        transport=refit.get("transport", ""),
        reason=refit.get("reason", ""),
        staged=refit.get("staged", False),
        detours=tuple(refit.get("detours") or ()),
        slowest=refit.get("slowest", ""),
        slowest_lag_seconds=refit.get("slowestLagSeconds", 0.0),
        attempts=tuple(RefitAttempt.model_validate(attempt) for attempt in refit.get("attempts") or ()),
    )
