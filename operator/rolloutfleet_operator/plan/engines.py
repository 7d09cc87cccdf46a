"""Which engine pods to make and which to end.

Engines are numbered 0 .. n-1, and each that is not retired has one pod that counts. A replacement takes the smallest incarnation above
every pod of that engine that still exists, so it never waits for a pod that is stuck in its end. Updates go delete-first, because GPUs are
rarely spare: pods of an older revision that do not serve go at once, those that serve go one at a time, and only while every other engine
serves. A pod that fails on a node that is avoided goes at once. One that is about to be taken away goes surge-first: it serves until its
successor's vLLM is up and every engine serves, or until it is taken. What is planned depends on what is observed alone, so a plan made
twice from a stale view is the same plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from rolloutfleet_operator.plan.gather import every_pod, missing_ranks
from rolloutfleet_operator.plan.observed import Pod

BACKOFF_CAP_SECONDS = 300


@dataclass(frozen=True, slots=True)
class EngineGoal:
    """What should be: engines, the revision of their pods, and whether an update may end pods that serve."""

    engines: int
    revision: str
    may_disrupt: bool = True
    retired: frozenset[int] = frozenset()
    """Engines that have no pod any more."""
    avoided: frozenset[str] = frozenset()
    """Nodes that new pods avoid."""
    backoff_cap_seconds: int = BACKOFF_CAP_SECONDS

    @property
    def wanted(self) -> tuple[int, ...]:
        """The engines that should have a pod."""
        return tuple(engine for engine in range(self.engines) if engine not in self.retired)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What to do now, all in order of engine; ``retry_after`` is when a replacement that is held back is due, in seconds."""

    create: tuple[tuple[int, int], ...] = ()
    """(engine, incarnation)"""
    complete: tuple[tuple[int, int, int], ...] = ()
    """(engine, incarnation, rank) of pods that engines lack which stay"""
    delete: tuple[Pod, ...] = ()
    retry_after: float | None = None

    def __bool__(self) -> bool:
        return bool(self.create or self.complete or self.delete)


def current_pods(pods: Iterable[Pod], revision: str = "") -> Mapping[int, Pod]:
    """Engine -> the live pod that counts for it: one that serves, else one that stays, else one of the revision, else the newest."""
    best: dict[int, Pod] = {}
    for pod in sorted(
        pods, key=lambda p: (p.engine, p.ready, not p.leaving, p.revision == revision, p.incarnation, p.name)
    ):
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
    current = {engine: pod for engine, pod in current_pods(own, goal.revision).items() if engine in goal.wanted}
    replaced = _outdated(goal, current) | {engine for engine, pod in current.items() if _fails_where_avoided(pod, goal)}
    leaving = {engine for engine, pod in current.items() if pod.leaving and pod.ready} - replaced
    # One that is about to go itself is no successor of a pod that could stay.
    candidates = [pod for pod in own if not (pod.leaving and pod.engine in replaced)]
    successors = _successors(goal, candidates, current, replaced | leaving)
    kept = {pod.uid for engine, pod in current.items() if engine not in replaced}
    kept |= {pod.uid for pod in successors.values()}
    if not replaced:
        kept -= {pod.uid for pod in _handed_over(goal, current, successors)}
    create, waits = [], []
    missing = {engine for engine in goal.wanted if engine not in current}
    for engine in sorted(missing | ((replaced | leaving) - set(successors))):
        wait = _backoff(goal, [pod for pod in own if pod.engine == engine and pod.revision == goal.revision], now)
        if wait > 0 and engine in missing:
            waits.append(wait)
        else:
            create.append((engine, _next_incarnation(engine, own, foreign)))
    created = {engine for engine, _ in create}
    delete = [pod for pod in own if _is_there(pod) and pod.uid not in kept and _may_go(pod, goal, created)]
    staying = sorted((pod for pod in own if pod.uid in kept), key=lambda pod: (pod.engine, pod.incarnation))
    return EnginePlan(
        create=tuple(create),
        complete=tuple((pod.engine, pod.incarnation, rank) for pod in staying for rank in missing_ranks(pod)),
        delete=tuple(sorted(delete, key=lambda pod: (pod.engine, pod.incarnation, pod.name))),
        retry_after=min(waits, default=None),
    )


def _outdated(goal: EngineGoal, current: Mapping[int, Pod]) -> set[int]:
    """Engines whose pod is to be replaced by one of the wanted revision now."""
    old = [pod for pod in current.values() if pod.revision != goal.revision]
    replace = {pod.engine for pod in old if not pod.ready}
    all_serve = len(current) == len(goal.wanted) and all(pod.ready for pod in current.values())
    if not replace and old and all_serve and goal.may_disrupt:
        replace = {min(pod.engine for pod in old)}
    return replace


def _fails_where_avoided(pod: Pod, goal: EngineGoal) -> bool:
    return pod.node in goal.avoided and pod.container.restarts > 0 and not pod.container.up and not pod.ready


def _successors(
    goal: EngineGoal, own: Sequence[Pod], current: Mapping[int, Pod], engines: set[int]
) -> Mapping[int, Pod]:
    """Engine -> the pod that is there already to take the place of its current one."""
    return current_pods(
        pod
        for pod in own
        if pod.engine in engines
        and pod.revision == goal.revision
        and pod.uid != current[pod.engine].uid
        and not _fails_where_avoided(pod, goal)
    )


def _handed_over(goal: EngineGoal, current: Mapping[int, Pod], successors: Mapping[int, Pod]) -> list[Pod]:
    """The pod about to be taken away that may go now: its successor is up, and every engine serves, one for certain hereafter.

    The successor joins the fleet then, and gets the version from a peer. One at a time: what is taken earlier is no worse off.
    """
    leaving = [engine for engine, pod in sorted(current.items()) if pod.leaving]
    stays = len(leaving) < len(current)
    if not stays or len(current) < len(goal.wanted) or not all(pod.ready for pod in current.values()):
        return []
    # A successor that tolerates the taint may be there again: it is no better off.
    up = [engine for engine in leaving if engine in successors and successors[engine].container.up]
    return [current[engine] for engine in up if not successors[engine].leaving][:1]


def _is_there(pod: Pod) -> bool:
    """Whether any pod of the engine has not been told to end."""
    return not all(part.terminating for part in every_pod(pod))


def _may_go(pod: Pod, goal: EngineGoal, created: set[int]) -> bool:
    """A dead pod stays until its replacement is made: its age is what the delay is counted from."""
    return not pod.dead or pod.engine not in goal.wanted or pod.engine in created


def _next_incarnation(engine: int, own: Sequence[Pod], foreign: Sequence[Pod]) -> int:
    return max((pod.incarnation for pod in (*own, *foreign) if pod.engine == engine), default=-1) + 1


def _backoff(goal: EngineGoal, pods: Sequence[Pod], now: datetime) -> float:
    """Seconds until the engine may have a new pod: doubled with each incarnation, counted from the birth of the newest dead one."""
    dead = [pod for pod in pods if pod.dead and not pod.terminating]
    if not dead:
        return 0.0
    newest = max(dead, key=lambda pod: pod.incarnation)
    delay = timedelta(seconds=min(2 ** min(newest.incarnation, 16), goal.backoff_cap_seconds))
    return max(0.0, (newest.created + delay - now).total_seconds())
