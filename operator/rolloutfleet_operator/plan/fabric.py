"""Whether any node offers what a fabric names."""

from collections.abc import Sequence

from rolloutfleet_operator.plan.fit import Fit
from rolloutfleet_operator.plan.observed import Node


def plan_fabric(resource: str, devices: int, gpu_resource: str, gpus: int, nodes: Sequence[Node] | None) -> Fit | None:
    """What keeps every node from holding an engine pod that needs these devices beside its GPUs; None when nothing does.

    Args:
        resource: the extended resource of RDMA devices; empty when none are needed.
        devices: how many a pod needs.
        gpu_resource: the extended resource of GPUs.
        gpus: how many a pod needs.
        nodes: None when they may not be read.
    """
    if not resource or nodes is None:
        return None
    offers = sorted(((dict(node.extended).get(resource, 0), node.name) for node in nodes), key=lambda o: (-o[0], o[1]))
    most, name = offers[0] if offers else (0, "")
    if not most:
        return Fit(False, f"fabric needs {devices} {resource}, which no node offers: is its device plugin installed?")
    if most < devices:
        return Fit(
            False, f"fabric.rdmaDevices is {devices} but the largest node offers {most} {resource} (node {name})"
        )
    both = [
        n
        for n in nodes
        if dict(n.extended).get(resource, 0) >= devices and dict(n.extended).get(gpu_resource, 0) >= gpus
    ]
    if not both:
        return Fit(False, f"no node offers both {devices} {resource} and {gpus} {gpu_resource}")
    return None
