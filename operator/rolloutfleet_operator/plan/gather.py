"""The pods of an engine as one: they live and die together, so decisions know engines of one pod alone.

The pod that stands for an engine is its leader, with what is worst in any of its pods: dead or about to go when one is, Ready when all
are. An engine of which a pod is missing altogether is not Ready, and is made whole again; one of which a pod is dead, or is going, is
replaced, for a name is not to be had twice while a pod is stuck in its end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from rolloutfleet_operator.plan.observed import ContainerState, Pod


def gather_engines(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """One pod for each engine and incarnation, by the leader's name."""
    ordered = sorted(pods, key=lambda pod: (pod.engine, pod.incarnation, pod.owner_uid, pod.rank, pod.name))
    groups = groupby(ordered, key=lambda pod: (pod.engine, pod.incarnation, pod.owner_uid))
    return tuple(sorted((_gather(tuple(group)) for _, group in groups), key=lambda pod: pod.name))


def every_pod(engine: Pod) -> tuple[Pod, ...]:
    """The pods that the one stands for, by rank."""
    return engine.parts or (engine,)


def missing_ranks(engine: Pod) -> tuple[int, ...]:
    """The ranks of the engine's pods that do not exist."""
    return tuple(sorted(set(range(engine.pods)) - {pod.rank for pod in every_pod(engine)}))


def _gather(pods: Sequence[Pod]) -> Pod:
    first = pods[0]
    if first.pods == len(pods) == 1:
        return first
    ended = next((pod for pod in pods if pod.dead), None)
    # A pod that nobody evicted is to blame for the end of the others.
    culprit = next((pod for pod in pods if pod.dead and not pod.disrupted), ended)
    # An end of any is an end of each: the leader says why as long as it has ended as often, for followers tell it.
    told = max(pods, key=lambda pod: pod.container.restarts)
    return replace(
        first,
        parts=tuple(pods),
        phase=culprit.phase if culprit is not None else first.phase,
        created=max(pod.created for pod in pods),
        ready=len(pods) >= first.pods and all(pod.ready for pod in pods),
        terminating=any(pod.terminating for pod in pods),
        address=first.address if first.rank == 0 else "",
        node=told.node if all(pod.node for pod in pods) else "",
        container=_container(pods, told),
        unschedulable=next((f"pod {pod.name}: {pod.unschedulable}" for pod in pods if pod.unschedulable), ""),
        sandbox_missing=any(pod.sandbox_missing for pod in pods),
        mounts=next((pod.mounts for pod in pods if pod.mounts), ""),
        disrupted=any(pod.disrupted for pod in pods),
        leaving=next((f"pod {pod.name}: {pod.leaving}" for pod in pods if pod.leaving), ""),
    )


def _container(pods: Sequence[Pod], told: Pod) -> ContainerState:
    """One state for all: the most that a container has ended is how often the engine has."""
    waiting = next((pod.container for pod in pods if pod.container.waiting_reason), told.container)
    return replace(
        told.container,
        started=all(pod.container.started for pod in pods),
        waiting_reason=waiting.waiting_reason,
        waiting_message=waiting.waiting_message,
        ended_at=max((pod.container.ended_at for pod in pods if pod.container.ended_at), default=None),
    )
