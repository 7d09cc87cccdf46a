"""Fleets that cannot be as they ask: the conditions say why, and what serves is let alone."""

import pytest

from apiserver.harness.api import Body
from apiserver.harness.simulation import GPUS, NODES
from apiserver.harness.space import Space, condition, pod_is_ready, says

pytestmark = pytest.mark.usefixtures("operator")


def test_an_engine_larger_than_any_node_is_told_with_both_numbers_and_nothing_is_taken_down(space: Space):
    fleet = space.make_fleet("large", replicas=2, parallelism={"tensor": 2})
    fleet.await_ready(2)
    before = fleet.child_uids()
    fleet.patch(parallelism={"tensor": 16})
    told = fleet.await_condition("PlacementSatisfied", "False", "NoNodeFits")["message"]
    assert told.startswith(
        f"parallelism asks for 16 GPUs on one node but the largest node offers {GPUS} nvidia.com/gpu (node {NODES[0]});"
    )
    body = fleet.await_condition("Ready", "False", "NoNodeFits")
    assert body["message"] == f"{told}; 2 of 2 engines serve"
    assert says(fleet.body(), "Reconciling", "True", "NoNodeFits")
    # Whatever the next passes do: another change of the spec makes some.
    generation = fleet.patch(template={"terminationGracePeriodSeconds": 1})["metadata"]["generation"]
    fleet.await_that("another pass", lambda found: found["status"]["observedGeneration"] == generation)
    pods = {name: uid for name, uid in before.items() if name.startswith("Pod/large-") and "-sync-" not in name}
    assert pods.items() <= fleet.child_uids().items()
    assert all(pod_is_ready(pod) for pod in fleet.pods().values())
    fleet.patch(parallelism={"tensor": 4})
    fleet.await_ready(2)
    assert says(fleet.body(), "PlacementSatisfied", "True", "Placed")
    fleet.delete()


def test_a_node_that_is_large_enough_ends_the_wait(space: Space):
    fleet = space.make_fleet("grows", parallelism={"tensor": 16})
    fleet.await_condition("PlacementSatisfied", "False", "NoNodeFits")
    resources = {"nvidia.com/gpu": "16"}
    patch = {"status": {"capacity": resources, "allocatable": resources}}
    try:
        space.cluster.merge("Node", "", NODES[0], patch, "status")
        fleet.await_ready(1)
    finally:
        resources["nvidia.com/gpu"] = str(GPUS)
        space.cluster.merge("Node", "", NODES[0], patch, "status")
        fleet.delete()
    fleet.await_gone()


@pytest.mark.row("A19")
def test_engines_that_have_no_node_are_counted(space: Space):
    fleet = space.make_fleet("crowd", replicas=len(NODES) + 1, parallelism={"tensor": GPUS})
    told = fleet.await_that(
        "all nodes are full",
        lambda found: (
            says(found, "PlacementSatisfied", "False", "Unschedulable")
            and found["status"]["readyReplicas"] == len(NODES)
        ),
    )
    message = condition(told, "PlacementSatisfied")["message"]
    assert message.endswith(f"; {len(NODES)} of {len(NODES) + 1} engines have a node")
    assert "Insufficient nvidia.com/gpu" in message
    assert says(told, "Ready", "False", "Unschedulable")
    fleet.patch(replicas=len(NODES))
    fleet.await_ready(len(NODES))
    assert says(fleet.body(), "PlacementSatisfied", "True", "Placed")
    fleet.delete()
    fleet.await_gone()


def foreign_objects(namespace: str) -> dict[str, Body]:
    """Objects with names that fleet ``taken`` needs, made by somebody else."""

    def made(kind: str, name: str, version: str = "v1", **fields: object) -> Body:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}, **fields}

    rbac = "rbac.authorization.k8s.io/v1"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "x"}
    container = {"name": "c", "image": "registry.example/other:1"}
    return {
        "ConfigMap": made("ConfigMap", "taken-members", data={"a": "b"}),
        "Pod": made("Pod", "taken-0-0-0", spec={"containers": [container]}),
        "Role": made("Role", "taken-sync", rbac, rules=[]),
        "RoleBinding": made("RoleBinding", "taken-sync", rbac, roleRef=reference),
        "Secret": made("Secret", "taken-token", stringData={"other": "x"}),
        "Service": made("Service", "taken", spec={"ports": [{"port": 80}]}),
        "ServiceAccount": made("ServiceAccount", "taken-sync"),
    }


@pytest.mark.parametrize("kind", sorted(foreign_objects("")))
def test_an_object_of_somebody_else_is_neither_taken_nor_deleted(space: Space, kind: str):
    foreign = space.cluster.create(foreign_objects(space.name)[kind])
    name = foreign["metadata"]["name"]
    fleet = space.make_fleet("taken")
    told = fleet.await_condition("Stalled", "True", "OwnershipConflict")["message"]
    assert told == (
        f"{kind} {space.name}/{name} exists and is owned by nobody, not by fleet taken; "
        "delete or rename it, or name the fleet otherwise"
    )
    assert says(fleet.body(), "Ready", "False", "OwnershipConflict")
    kept = space.cluster.get(kind, space.name, name)
    assert kept["metadata"]["uid"] == foreign["metadata"]["uid"]
    assert "ownerReferences" not in kept["metadata"]
    managers = {entry["manager"] for entry in kept["metadata"].get("managedFields", ())}
    assert "rolloutfleet-operator" not in managers
    space.cluster.delete(kind, space.name, name)
    space.cluster.wait(
        "it is gone",
        kind,
        space.name,
        lambda state: foreign["metadata"]["uid"] not in {body["metadata"]["uid"] for body in state.values()},
        name=name,
    )
    fleet.patch(template={"terminationGracePeriodSeconds": 1})
    fleet.await_ready(1)
    fleet.delete()
    fleet.await_gone()


def test_a_token_that_somebody_gave_is_used(space: Space):
    metadata = {"name": "given-token", "namespace": space.name}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "mine"}}
    given = space.cluster.create(body)
    fleet = space.make_fleet("given")
    fleet.await_ready(1)
    after = space.cluster.get("Secret", space.name, "given-token")
    assert after["metadata"]["resourceVersion"] == given["metadata"]["resourceVersion"]
    fleet.delete()


def test_an_abbreviated_argument_that_only_the_operator_sees_through_stalls_the_fleet(space: Space):
    fleet = space.make_fleet("short", engine={"args": {"tensor-parallel": "2"}})
    told = fleet.await_condition("Stalled", "True", "InvalidSpec")["message"]
    assert "engine.args.tensor-parallel (vLLM reads it as tensor-parallel-size) is not for users to set" in told
    assert fleet.pods() == {}
    space.cluster.call(
        "PATCH",
        f"/apis/rolloutfleet.io/v1alpha1/namespaces/{space.name}/rolloutfleets/short",
        [{"op": "remove", "path": "/spec/engine/args"}],
        "application/json-patch+json",
    )
    fleet.await_ready(1)
    fleet.delete()


def test_a_quota_that_refuses_pods_blocks_the_fleet_in_the_api_servers_words(space: Space):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": space.name},
        "spec": {"hard": {"requests.nvidia.com/gpu": "1"}},
    }
    path = f"/api/v1/namespaces/{space.name}/resourcequotas"
    space.cluster.call("POST", path, quota)
    fleet = space.make_fleet("quota", replicas=2)
    told = fleet.await_condition("Ready", "False", "Blocked")["message"]
    assert "exceeded quota: few" in told
    assert says(fleet.body(), "Stalled", "False")
    space.cluster.call("DELETE", f"{path}/few")
    fleet.patch(template={"terminationGracePeriodSeconds": 1})
    fleet.await_ready(2)
    fleet.delete()
