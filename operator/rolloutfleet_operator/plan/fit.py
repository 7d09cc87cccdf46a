"""Whether one engine fits any node at all."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet_operator.plan.observed import Node


@dataclass(frozen=True, slots=True)
class Fit:
    """``fits`` is None when nodes may not be read; then the scheduler alone decides."""

    fits: bool | None
    message: str


def plan_fit(tensor: int, gpu_resource: str, nodes: Sequence[Node] | None) -> Fit:
    """Whether a node offers the GPUs of one engine; busy ones count, since they may become free."""
    if not gpu_resource:
        return Fit(True, "engines run on CPUs")
    if nodes is None:
        return Fit(None, "the operator may not read nodes, so the scheduler alone decides")
    offers = sorted(
        ((dict(node.extended).get(gpu_resource, 0), node.name) for node in nodes), key=lambda o: (-o[0], o[1])
    )
    if not offers:
        return Fit(False, f"parallelism.tensor is {tensor} but the cluster has no node")
    most, name = offers[0]
    if most < tensor:
        return Fit(
            False, f"parallelism.tensor is {tensor} but the largest node offers {most} {gpu_resource} (node {name})"
        )
    return Fit(True, f"node {name} offers {most} {gpu_resource}")
