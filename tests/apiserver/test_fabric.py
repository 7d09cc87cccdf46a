"""Fabrics before a real API server: what a cluster lacks is told before a pod starts, and what is rendered is accepted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from apiserver.harness.api import Body, Cluster
from apiserver.harness.crds import apply_crds, remove_crds
from apiserver.harness.simulation import NODES
from apiserver.harness.space import Space

pytestmark = pytest.mark.usefixtures("operator")

RDMA = "rdma/hca_shared"
COMPUTE_DOMAINS = "computedomains.resource.nvidia.com"


def offer(cluster: Cluster, amount: str | None) -> None:
    resources = {RDMA: amount}
    cluster.merge("Node", "", NODES[0], {"status": {"capacity": resources, "allocatable": resources}}, "status")


def compute_domains() -> dict[str, Any]:
    """A stand-in for the kind of NVIDIA's DRA driver, which no Go module has: its spec's fields, and no controller behind it."""
    template = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    channel = {
        "type": "object",
        "required": ["resourceClaimTemplate"],
        "properties": {"resourceClaimTemplate": template, "allocationMode": {"type": "string"}},
    }
    spec = {
        "type": "object",
        "required": ["channel", "numNodes"],
        "properties": {"channel": channel, "numNodes": {"type": "integer"}},
    }
    schema = {"type": "object", "properties": {"spec": spec}}
    names = {"kind": "ComputeDomain", "plural": "computedomains", "singular": "computedomain"}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": COMPUTE_DOMAINS},
        "spec": {"group": "resource.nvidia.com", "names": names, "scope": "Namespaced", "versions": [version]},
    }


def engine_of(pod: Body) -> Body:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def test_adapters_that_no_node_offers_are_told_with_both_numbers_and_pods_wait_for_a_node_that_does(space: Space):
    fabric = {"preset": "RoCE", "rdmaResource": RDMA, "rdmaDevices": 2, "sharedMemory": "1Gi", "interface": "=net1"}
    fleet = space.make_fleet("roce", fabric=fabric)
    told = fleet.await_condition("PlacementSatisfied", "False", "NoNodeFits")["message"]
    assert told == f"fabric needs 2 {RDMA}, which no node offers: is its device plugin installed?"
    try:
        offer(space.cluster, "1")
        bounded = f"fabric.rdmaDevices is 2 but the largest node offers 1 {RDMA} (node {NODES[0]})"
        fleet.await_that("both numbers", lambda body: bounded in str(body["status"]["conditions"]))
        offer(space.cluster, "4")
        fleet.await_ready(1)
        (pod,) = fleet.pods().values()
        assert pod["spec"]["nodeName"] == NODES[0]
        assert engine_of(pod)["resources"]["limits"][RDMA] == "2"
        assert engine_of(pod)["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    finally:
        offer(space.cluster, None)
        fleet.delete()
    fleet.await_gone()


def test_the_hosts_network_leaves_room_for_one_engine_on_each_node(space: Space):
    fleet = space.make_fleet("host", replicas=2, fabric={"hostNetwork": True})
    fleet.await_ready(2)
    pods = fleet.pods().values()
    assert all(pod["spec"]["hostNetwork"] for pod in pods)
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    fleet.delete()
    fleet.await_gone()


def test_channels_between_nodes_wait_for_the_driver_and_then_come_from_a_domain_of_the_fleet(
    space: Space, admin: Cluster, tmp_path: Path
):
    fleet = space.make_fleet("nvlink", fabric={"preset": "MultiNodeNVLink"})
    told = fleet.await_condition("Ready", "False", "Blocked")["message"]
    assert "needs the kind ComputeDomain (resource.nvidia.com/v1beta1), which this cluster does not have" in told
    assert fleet.pods() == {}
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(compute_domains()))
    apply_crds(admin, [tmp_path / "crd.yaml"])
    try:
        (pod,) = fleet.await_pods(lambda pods: list(pods.values()) if pods else None)
        domain = admin.get("ComputeDomain", space.name, "nvlink-fabric")
        assert domain["metadata"]["ownerReferences"][0]["uid"] == fleet.body()["metadata"]["uid"]
        assert domain["spec"] == {"channel": {"resourceClaimTemplate": {"name": "nvlink-fabric"}}, "numNodes": 0}
        (claim,) = pod["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == "nvlink-fabric"
        assert engine_of(pod)["resources"]["claims"] == [{"name": claim["name"]}]
    finally:
        fleet.delete()
        fleet.await_gone()
        remove_crds(admin, [COMPUTE_DOMAINS])
