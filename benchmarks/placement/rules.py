"""Other rules of placement, as simulations: kube-scheduler's score of nodes, pod by pod, with what the rule lets a pod choose from.

What is simulated: the filter by free GPUs and by rack, NodeResourcesFit's score (LeastAllocated, the default, or MostAllocated) over
requests in proportion to GPUs, and a random choice among the best, as the scheduler makes it. What is left out: other score plugins,
preemption, and pods that come or go meanwhile. A pod that finds no node stays pending, and those of its engine that have nodes keep them,
as in a cluster.
"""

import random
from collections.abc import Iterable, Sequence
from enum import StrEnum

from benchmarks.placement.clusters import RACK, Arrivals, hold
from rolloutfleet_operator.plan.placement.request import PlacementRequest
from rolloutfleet_operator.plan.placement.solve import plan_placement


class Rule(StrEnum):
    """Who decides where an engine's pods go."""

    PLANNER = "planner"
    LEADER_FIRST = "leader first"
    """LeaderWorkerSet's: leaders are scheduled as if alone, followers must follow into the leader's rack. (Its exclusive topology would
    moreover keep every other engine out of that rack, which is left out here: it places fewer.)"""
    POD_BY_POD = "pod by pod"
    """Required pod affinity: the first pod goes anywhere, the others of its engine into the same rack."""


class Score(StrEnum):
    """NodeResourcesFit's strategy."""

    LEAST = "LeastAllocated"
    MOST = "MostAllocated"


class Cluster:
    """Free GPUs, and kube-scheduler's choice among nodes."""

    def __init__(self, arrivals: Arrivals, score: Score, chance: random.Random) -> None:
        self._free = [node.free for node in arrivals.nodes]
        self._racks: dict[str, list[int]] = {}
        for index, node in enumerate(arrivals.nodes):
            self._racks.setdefault(node.labels[RACK.label], []).append(index)
        self._rack_of = [node.labels[RACK.label] for node in arrivals.nodes]
        self._sign = 1 if score is Score.LEAST else -1
        self._chance = chance

    def schedule(self, gpus: int, rack: str | None = None) -> str | None:
        """Bind a pod to the best node, of a rack or of all; the node's rack, or None when none has room."""
        candidates: Iterable[int] = range(len(self._free)) if rack is None else self._racks[rack]
        fitting = [index for index in candidates if self._free[index] >= gpus]
        if not fitting:
            return None
        best = max(self._sign * self._free[index] for index in fitting)
        chosen = self._chance.choice([index for index in fitting if self._sign * self._free[index] == best])
        self._free[chosen] -= gpus
        return self._rack_of[chosen]


def place(arrivals: Arrivals, rule: Rule, score: Score, seed: int) -> list[int]:
    """For each fleet the whole engines that stand in the end."""
    if rule is Rule.PLANNER:
        return _plan(arrivals)
    cluster = Cluster(arrivals, score, random.Random(seed))
    simulate = _leaders_first if rule is Rule.LEADER_FIRST else _pod_by_pod
    return [simulate(cluster, fleet, *_pods(fleet)) for fleet in arrivals.fleets]


def _pods(fleet: PlacementRequest) -> tuple[int, int]:
    gpus = min(fleet.gpus_per_node or fleet.parallelism.world, fleet.parallelism.world)
    return gpus, fleet.parallelism.world // gpus


def _leaders_first(cluster: Cluster, fleet: PlacementRequest, gpus: int, pods: int) -> int:
    racks: Sequence[str | None] = [cluster.schedule(gpus) for _ in range(fleet.replicas)]
    followed = [[cluster.schedule(gpus, rack) for _ in range(pods - 1)] for rack in racks if rack is not None]
    return sum(all(followers) for followers in followed)


def _pod_by_pod(cluster: Cluster, fleet: PlacementRequest, gpus: int, pods: int) -> int:
    whole = 0
    for _ in range(fleet.replicas):
        rack = cluster.schedule(gpus)
        others = [rack is not None and cluster.schedule(gpus, rack) is not None for _ in range(pods - 1)]
        whole += rack is not None and all(others)
    return whole


def _plan(arrivals: Arrivals) -> list[int]:
    """Each fleet is planned when it comes, and what stands is not touched, as in the simulations."""
    nodes, whole = arrivals.nodes, list[int]()
    for fleet in arrivals.fleets:
        held: dict[str, int] = {}
        (plan,) = plan_placement(nodes, [fleet]).fleets
        for engine in plan.engines:
            for node in engine.nodes:
                held[node] = held.get(node, 0) + engine.gpus
        nodes = hold(nodes, held)
        whole.append(len(plan.engines))
    return whole
