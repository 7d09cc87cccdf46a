"""Nodes, Pods and fleets as kubectl writes them, cut to the fields that count."""

from pathlib import Path
from typing import Any

import yaml

RACK = "network.topology.nvidia.com/leaf"


def node_body(
    name: str, rack: str | None = None, gpus: Any = "8", *, ready: str = "True", **spec: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **({RACK: rack} if rack else {})}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "128", "nvidia.com/gpu": gpus},
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}],
        },
    }


def pod_body(
    name: str, node: str, gpus: Any, namespace: str = "data", phase: str = "Running", **labels: str
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": gpus}}}],
        },
        "status": {"phase": phase},
    }


def engine_body(fleet: str, engine: int, rank: int, node: str, gpus: int, incarnation: int = 1) -> dict[str, Any]:
    """A pod that the operator has made for an engine."""
    labels = {"fleet": fleet, "engine": str(engine), "rank": str(rank), "incarnation": str(incarnation)}
    return pod_body(
        f"{fleet}-{engine}-{rank}-{incarnation}",
        node,
        str(gpus),
        "rl",
        **{f"rolloutfleet.io/{key}": value for key, value in labels.items()},
    )


def fleet_body(name: str = "large", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rolloutfleet.io/v1alpha1",
        "kind": "RolloutFleet",
        "metadata": {"name": name, "namespace": "rl"},
        "spec": {
            "replicas": 2,
            "parallelism": {"tensor": 8, "pipeline": 2},
            "placement": {"engine": {"required": "rack"}},
            **spec,
        },
    }


def write_list(path: Path, bodies: list[dict[str, Any]]) -> str:
    """A file as ``kubectl get -o yaml`` writes one; its path."""
    path.write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": bodies, "metadata": {"resourceVersion": ""}})
    )
    return str(path)
