"""Whether one engine fits the cluster's nodes at all."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet_operator.plan.observed import Node


@dataclass(frozen=True, slots=True)
class Fit:
    """``fits`` is None when nodes may not be read; then the scheduler alone decides."""

    fits: bool | None
    message: str


def plan_fit(gpus: int, pods: int, gpu_resource: str, nodes: Sequence[Node] | None) -> Fit:
    """Whether nodes offer the GPUs of one engine; busy ones count, since they may become free.

    Args:
        gpus: of each of the engine's pods.
        pods: of the engine.
        gpu_resource: what counts GPUs; empty for engines on CPUs.
        nodes: None when they may not be read.
    """
    if not gpu_resource:
        return Fit(True, "engines run on CPUs")
    if nodes is None:
        return Fit(None, "the operator may not read nodes, so the scheduler alone decides")
    offers = sorted(
        ((dict(node.extended).get(gpu_resource, 0), node.name) for node in nodes), key=lambda o: (-o[0], o[1])
    )
    if not offers:
        return Fit(False, f"{_needs(gpus, pods)} but the cluster has no node")
    most, name = offers[0]
    if most < gpus:
        advice = "" if gpus == 1 else "; spread engines over more nodes by parallelism.gpusPerNode"
        return Fit(
            False, f"{_needs(gpus, pods)} but the largest node offers {most} {gpu_resource} (node {name}){advice}"
        )
    room = sum(offer >= gpus for offer, _ in offers)
    if room < pods:
        return Fit(False, f"{_needs(gpus, pods)} but nodes with as many: {room}")
    return Fit(True, f"node {name} offers {most} {gpu_resource}")


def _needs(gpus: int, pods: int) -> str:
    each = f"{gpus} GPU{'' if gpus == 1 else 's'}"
    return (
        f"parallelism asks for {each} on one node"
        if pods == 1
        else f"parallelism asks for {each} on each of {pods} nodes"
    )
