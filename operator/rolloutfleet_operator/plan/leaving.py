"""Which pods are about to be taken away while they serve still: the word of a spot handler, an autoscaler, or a person."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from rolloutfleet_operator.plan.observed import Node, Pod

LEAVING_TAINTS: Final = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/spot-itn",
        "cloud.google.com/impending-node-termination",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "node.cloudprovider.kubernetes.io/shutdown",
        "node.kubernetes.io/out-of-service",
    }
)
"""Taints that announce the end of a node. A cordon alone does not: what runs there may stay."""


def mark_leaving(pods: Iterable[Pod], nodes: Sequence[Node] | None, further: Iterable[str] = ()) -> tuple[Pod, ...]:
    """The pods, those on a node that is about to go saying so; annotated ones say it themselves.

    Args:
        pods: of the fleet.
        nodes: None when they may not be read; then the annotation alone tells.
        further: keys of taints that announce the end of a node here.
    """
    known = LEAVING_TAINTS | set(further)
    going = {node.name: taint for node in nodes or () for taint in node.taints if taint in known}
    return tuple(
        replace(pod, leaving=f"node {pod.node} has the taint {going[pod.node]}")
        if pod.node in going and not pod.leaving
        else pod
        for pod in pods
    )
