"""What a fabric asks for, what it adds to pods, and what becomes of a fleet whose cluster lacks it."""

import pytest

from rolloutfleet_operator.api.parse import parse_fleet_spec
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import InvalidSpecError, NotFoundError
from rolloutfleet_operator.plan.fabric import plan_fabric
from rolloutfleet_operator.plan.observed import Node
from rolloutfleet_operator.reconcile.fleetpass import run_pass
from rolloutfleet_operator.render.engine import render_engine_pod, render_engine_template
from rolloutfleet_operator.render.fabric import render_compute_domain

GPU, RDMA = "nvidia.com/gpu", "rdma/hca_shared"
IB = {"preset": "InfiniBand", "rdmaResource": RDMA}
NVLINK = {"preset": "MultiNodeNVLink"}


@pytest.fixture
def render(identity, images, make_spec):
    def run(**fields):
        pod = render_engine_pod(identity, render_engine_template(identity, make_spec(**fields), images), 0, 0)
        return pod["spec"], pod["spec"]["containers"][0]

    return run


def variables(container):
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_without_a_fabric_pods_are_as_they_were_before_there_were_any(render):
    pod, container = render()
    assert (pod, container) == render(fabric={"preset": "None"})
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "resourceClaims", "dnsPolicy"} & set(pod)
    assert "ROLLOUTFLEET_FABRIC" not in variables(container)


def test_adapters_come_with_the_right_to_lock_memory_and_beside_the_gpus(render):
    pod, container = render(fabric={**IB, "rdmaDevices": 4, "sharedMemory": "64Gi"}, parallelism={"tensor": 8})
    assert container["resources"] == {"limits": {GPU: "8", RDMA: "4"}}
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert variables(container)["ROLLOUTFLEET_FABRIC"] == "InfiniBand"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["rolloutfleet-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_efa_has_a_resource_of_its_own_and_names_its_provider(render):
    _, container = render(fabric={"preset": "EFA"})
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"
    assert variables(container)["FI_PROVIDER"] == "efa"


def test_interfaces_are_told_to_every_library_and_a_users_own_variable_stands(render):
    own = [{"name": "NCCL_SOCKET_IFNAME", "value": "=net2"}]
    _, container = render(fabric={"interface": "=net1"}, engine={"env": own})
    told = {name: value for name, value in variables(container).items() if name.endswith("IFNAME")}
    assert told == {
        "GLOO_SOCKET_IFNAME": "=net1",
        "NCCL_SOCKET_IFNAME": "=net2",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=net1",
    }


def test_the_hosts_network_still_resolves_the_fleets_names(render):
    pod, _ = render(fabric={"hostNetwork": True})
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize("template", [None, "imex"])
def test_nvlink_between_nodes_gives_each_pod_a_channel(render, identity, make_spec, template):
    fabric = {**NVLINK, **({"claimTemplate": template} if template else {})}
    pod, container = render(fabric=fabric)
    (claim,) = pod["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == (template or "demo-fabric")
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    domain = render_compute_domain(identity, make_spec(fabric=fabric).fabric)
    if template:
        assert domain is None
    else:
        assert domain["spec"] == {"channel": {"resourceClaimTemplate": {"name": "demo-fabric"}}, "numNodes": 0}


@pytest.mark.parametrize(
    ("fabric", "words"),
    [
        ({"preset": "RoCE"}, "fabric.preset RoCE needs fabric.rdmaResource"),
        ({"rdmaResource": RDMA}, f"fabric.rdmaResource is {RDMA} but fabric.preset is None"),
        ({"claimTemplate": "x"}, "fabric.claimTemplate is x but fabric.preset is None"),
    ],
)
def test_a_stored_fabric_that_contradicts_itself_is_refused_as_the_schema_does(make_body, fabric, words):
    with pytest.raises(InvalidSpecError, match=words):
        parse_fleet_spec(make_body(fabric=fabric))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([("a", 8, 0)], f"fabric needs 2 {RDMA}, which no node offers: is its device plugin installed?"),
        ([], f"fabric needs 2 {RDMA}, which no node offers: is its device plugin installed?"),
        ([("a", 8, 1)], f"fabric.rdmaDevices is 2 but the largest node offers 1 {RDMA} (node a)"),
        ([("a", 8, 0), ("b", 0, 2)], f"no node offers both 2 {RDMA} and 8 {GPU}"),
        ([("a", 8, 2)], None),
    ],
)
def test_what_no_node_offers_is_named_with_both_numbers(nodes, message):
    found = plan_fabric(RDMA, 2, GPU, 8, [Node(name, ((GPU, gpus), (RDMA, rdma))) for name, gpus, rdma in nodes])
    assert (found and found.message) == message


def test_nodes_that_may_not_be_read_leave_adapters_to_the_scheduler():
    assert plan_fabric(RDMA, 2, GPU, 8, None) is None


async def test_no_pod_starts_before_the_cluster_knows_compute_domains(runtime, cluster, make_body):
    cluster.put(make_body(fabric=NVLINK))
    cluster.refuse["create", "ComputeDomain"] = NotFoundError("the server could not find the requested resource")
    result = await run_pass(runtime, ("rl", "demo"), cluster.observe, 0)
    assert "needs the kind ComputeDomain (resource.nvidia.com/v1beta1)" in str(result.error)
    assert not [pod for pod in cluster.of("Pod") if pod["metadata"]["labels"]["rolloutfleet.io/role"] == "leader"]
    ready = next(c for c in result_status(cluster)["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Blocked")
    del cluster.refuse["create", "ComputeDomain"]
    await run_pass(runtime, ("rl", "demo"), cluster.observe, 0)
    order = [kind for verb, kind, _ in cluster.writes if verb == "create" and kind in {"ComputeDomain", "Pod"}]
    assert order[0] == "ComputeDomain"
    assert "Pod" in order


def result_status(cluster):
    return cluster.objects[ObjectRef("RolloutFleet", "rl", "demo")]["status"]
