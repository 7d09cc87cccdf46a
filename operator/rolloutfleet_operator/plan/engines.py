"""Which engine pods to make and which to end.

Engines are numbered 0 .. n-1, and each has one pod that counts. A replacement takes the smallest incarnation above every pod of that
engine that still exists, so it never waits for a pod that is stuck in its end. Updates go delete-first, because GPUs are rarely spare:
pods of an older revision that do not serve go at once, those that serve go one at a time, and only while every other engine serves.
What is planned depends on what is observed alone, so a plan made twice from a stale view is the same plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rolloutfleet_operator.plan.observed import Pod

BACKOFF_CAP_SECONDS = 300


@dataclass(frozen=True, slots=True)
class EngineGoal:
    """What should be: engines, the revision of their pods, and whether an update may end pods that serve."""

    engines: int
    revision: str
    may_disrupt: bool = True


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to do now, both in order of engine; ``retry_after`` is when a replacement that is held back is due, in seconds."""

    create: tuple[tuple[int, int], ...] = ()
    """(engine, incarnation)"""
    delete: tuple[Pod, ...] = ()
    retry_after: float | None = None

    def __bool__(self) -> bool:
        return bool(self.create or self.delete)


def current_pods(pods: Iterable[Pod], revision: str = "") -> Mapping[int, Pod]:
    """Engine -> the live pod that counts for it: one that serves, else one of the revision, else the newest."""
    best: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda p: (p.engine, p.ready, p.revision == revision, p.incarnation, p.name)):
        if pod.live:
            best[pod.engine] = pod
    return best


def plan_engines(goal: EngineGoal, own: Sequence[Pod], foreign: Sequence[Pod], now: datetime) -> EnginePlan:
    """The pods to make and to end now.

    Args:
        goal: what should be.
        own: the fleet's engine pods.
        foreign: engine pods of a former fleet of the same name; their names are taken.
        now: for the delay after pods that died young.
    """
    current = {engine: pod for engine, pod in current_pods(own, goal.revision).items() if engine < goal.engines}
    outdated = _outdated(goal, current)
    successors = current_pods(pod for pod in own if pod.engine in outdated and pod.revision == goal.revision)
    kept = {pod.uid for engine, pod in current.items() if engine not in outdated}
    kept |= {pod.uid for pod in successors.values()}
    create, waits = [], []
    missing = [engine for engine in range(goal.engines) if engine not in current]
    for engine in sorted({*missing, *(outdated - set(successors))}):
        wait = _backoff([pod for pod in own if pod.engine == engine and pod.revision == goal.revision], now)
        if wait > 0 and engine not in outdated:
            waits.append(wait)
        else:
            create.append((engine, _next_incarnation(engine, own, foreign)))
    created = {engine for engine, _ in create}
    delete = [pod for pod in own if not pod.terminating and pod.uid not in kept and _may_go(pod, goal, created)]
    return EnginePlan(
        create=tuple(create),
        delete=tuple(sorted(delete, key=lambda pod: (pod.engine, pod.incarnation, pod.name))),
        retry_after=min(waits, default=None),
    )


def _outdated(goal: EngineGoal, current: Mapping[int, Pod]) -> set[int]:
    """Engines whose pod is to be replaced by one of the wanted revision now."""
    old = [pod for pod in current.values() if pod.revision != goal.revision]
    replace = {pod.engine for pod in old if not pod.ready}
    all_serve = len(current) == goal.engines and all(pod.ready for pod in current.values())
    if not replace and old and all_serve and goal.may_disrupt:
        replace = {min(pod.engine for pod in old)}
    return replace


def _may_go(pod: Pod, goal: EngineGoal, created: set[int]) -> bool:
    """A dead pod stays until its replacement is made: its age is what the delay is counted from."""
    return not pod.dead or pod.engine >= goal.engines or pod.engine in created


def _next_incarnation(engine: int, own: Sequence[Pod], foreign: Sequence[Pod]) -> int:
    return max((pod.incarnation for pod in (*own, *foreign) if pod.engine == engine), default=-1) + 1


def _backoff(pods: Sequence[Pod], now: datetime) -> float:
    """Seconds until the engine may have a new pod: doubled with each incarnation, counted from the birth of the newest dead one."""
    dead = [pod for pod in pods if pod.dead and not pod.terminating]
    if not dead:
        return 0.0
    newest = max(dead, key=lambda pod: pod.incarnation)
    delay = timedelta(seconds=min(2 ** min(newest.incarnation, 16), BACKOFF_CAP_SECONDS))
    return max(0.0, (newest.created + delay - now).total_seconds())
