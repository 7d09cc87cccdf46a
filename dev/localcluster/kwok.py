"""Fake nodes: objects that KWOK keeps Ready, and whose pods it reports as running."""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from localcluster.apiclient import ApiClient, ApiError, in_parallel, node_is_ready
from localcluster.components import Component, Health
from localcluster.constants import KWOK_PORT, LOOPBACK
from localcluster.errors import LauncherError
from localcluster.gobuild import find_program
from localcluster.paths import Paths

ANNOTATION = "kwok.x-k8s.io/node"
READY_SECONDS = 30.0
GROUP_LABEL = "localcluster.rolloutfleet.io/group"
_INDEX = re.compile(r"\{i(?:([/%])(\d+))?\}")
_TAINT = re.compile(r"([^=:]+)(?:=([^:]*))?:(NoSchedule|PreferNoSchedule|NoExecute)")


def component(paths: Paths, environment: Mapping[str, str]) -> Component:
    """The KWOK controller: it touches only nodes with the annotation `kwok.x-k8s.io/node=fake`."""
    argv = (
        find_program(paths, "kwok", environment),
        f"--kubeconfig={paths.config / 'kwok.kubeconfig'}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        # Without leases of their own the fake nodes turn NotReady after the node monitor's grace period.
        "--node-lease-duration-seconds=40",
        f"--server-address={LOOPBACK}:{KWOK_PORT}",
        "--cidr=10.200.0.0/16",
        "--node-ip=10.200.0.1",
    )
    config = (paths.config / "kwok.kubeconfig",)
    return Component("kwok", argv, Health(f"http://{LOOPBACK}:{KWOK_PORT}/healthz"), ((LOOPBACK, KWOK_PORT),), config)


def expand(template: str, index: int) -> str:
    """`{i}` is the node's index, `{i/8}` the index divided by 8 and rounded down, `{i%8}` the rest."""

    def value(match: re.Match[str]) -> str:
        operator, number = match.groups()
        if operator is None:
            return str(index)
        if int(number) == 0:
            raise LauncherError(f"{match.group(0)} in {template!r} divides by zero")
        return str(index // int(number) if operator == "/" else index % int(number))

    return _INDEX.sub(value, template)


def parse_labels(pairs: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE strings as a mapping. Raises LauncherError for one without `=`."""
    labels = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise LauncherError(f"label {pair!r}: give KEY=VALUE; in VALUE, {{i}}, {{i/8}} and {{i%8}} are filled in")
        labels[key] = value
    return labels


def parse_taint(text: str) -> dict[str, str]:
    """KEY[=VALUE]:EFFECT as a taint. Raises LauncherError when it is not of that form."""
    match = _TAINT.fullmatch(text)
    if match is None:
        raise LauncherError(f"taint {text!r}: give KEY[=VALUE]:NoSchedule, :PreferNoSchedule or :NoExecute")
    key, value, effect = match.groups()
    return {"key": key, "effect": effect, **({"value": value} if value else {})}


def render_node(
    prefix: str, index: int, labels: Mapping[str, str], gpus: int, taints: list[dict[str, str]]
) -> dict[str, Any]:
    """One fake Node: 64 CPUs, 512 GiB, 250 pods and `gpus` of nvidia.com/gpu."""
    name = f"{prefix}-{index:03d}"
    resources = {"cpu": "64", "memory": "512Gi", "pods": "250"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "type": "kwok",
                GROUP_LABEL: prefix,
                **{key: expand(value, index) for key, value in sorted(labels.items())},
            },
        },
        "spec": {"taints": taints} if taints else {},
        "status": {"capacity": resources, "allocatable": resources},
    }


def set_nodes(
    client: ApiClient, count: int, prefix: str, labels: Mapping[str, str], gpus: int, taints: list[dict[str, str]]
) -> tuple[int, int]:
    """Makes the group `prefix` consist of exactly `count` nodes; (made or brought up to date, removed)."""
    wanted = {f"{prefix}-{i:03d}": render_node(prefix, i, labels, gpus, taints) for i in range(count)}
    present = {node["metadata"]["name"] for node in client.list_all("/api/v1/nodes", f"{GROUP_LABEL}={prefix}")}
    surplus = sorted(present - set(wanted))
    in_parallel(lambda node: _put(client, node), wanted.values())
    in_parallel(lambda name: client.request("DELETE", f"/api/v1/nodes/{name}"), surplus)
    _await_ready(client, prefix, len(wanted))
    return len(wanted), len(surplus)


def _await_ready(client: ApiClient, prefix: str, count: int) -> None:
    deadline = time.monotonic() + READY_SECONDS + count / 20
    while True:
        nodes = client.list_all("/api/v1/nodes", f"{GROUP_LABEL}={prefix}")
        ready = sum(node_is_ready(node) for node in nodes)
        if ready >= count:
            return
        if time.monotonic() > deadline:
            raise LauncherError(f"{ready} of {count} fake nodes of group {prefix!r} are Ready; see `logs kwok`")
        time.sleep(0.1)


def _put(client: ApiClient, node: dict[str, Any]) -> None:
    name = node["metadata"]["name"]
    try:
        client.request("POST", "/api/v1/nodes", node)
    except ApiError as error:
        if error.status != 409:
            raise
        patch = "application/merge-patch+json"
        fields = {"metadata": node["metadata"], "spec": {"taints": node["spec"].get("taints")}}
        client.request("PATCH", f"/api/v1/nodes/{name}", fields, patch)
        client.request("PATCH", f"/api/v1/nodes/{name}/status", {"status": node["status"]}, patch)
