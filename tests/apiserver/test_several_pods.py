"""Engines of several pods before a real API server and scheduler: spread over nodes, counted as engines, and replaced as a whole."""

import pytest

from apiserver.harness.space import Fleet, Space, pod_is_ready
from rolloutfleet_operator import naming

pytestmark = pytest.mark.usefixtures("operator")

TWO = {"tensor": 16, "gpusPerNode": 8}


def parts(fleet: Fleet) -> str:
    return f"{fleet.selector},{naming.LABEL_ENGINE}"


@pytest.mark.row("A12", "A21")
def test_an_engine_larger_than_a_node_takes_two_and_is_one_engine_to_whoever_counts(space: Space):
    fleet = space.make_fleet("wide", replicas=2, parallelism=TWO)
    fleet.await_ready(2)
    pods = fleet.pods(parts(fleet))
    assert sorted(pods) == ["wide-0-0-0", "wide-0-1-0", "wide-1-0-0", "wide-1-1-0"]
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 4
    members = fleet.roster()["members"]
    assert [(member["podName"], member["ranks"]) for member in members] == [("wide-0-0-0", 16), ("wide-1-0-0", 16)]
    fleet.delete()
    fleet.await_gone()


@pytest.mark.scenario("F72")
def test_a_follower_that_is_gone_is_made_again_and_no_other_engine_is_touched(space: Space):
    fleet = space.make_fleet("paired", replicas=2, parallelism=TWO)
    fleet.await_ready(2)
    before = {name: pod["metadata"]["uid"] for name, pod in fleet.pods(parts(fleet)).items()}
    space.cluster.delete("Pod", space.name, "paired-1-1-0")

    def whole(pods: dict) -> bool:
        fresh = [pod for pod in pods.values() if pod["metadata"]["uid"] != before["paired-1-1-0"]]
        return len(fresh) == len(pods) == 4 and all(map(pod_is_ready, fresh))

    fleet.await_pods(whole, parts(fleet))
    after = {name: pod["metadata"]["uid"] for name, pod in fleet.pods(parts(fleet)).items()}
    assert {name: uid for name, uid in after.items() if name.startswith("paired-0-")} == {
        name: uid for name, uid in before.items() if name.startswith("paired-0-")
    }
    fleet.await_ready(2)
    fleet.patch(replicas=1)
    fleet.await_pods(lambda pods: sorted(pods) == ["paired-0-0-0", "paired-0-1-0"], parts(fleet))
    fleet.delete()
    fleet.await_gone()


@pytest.mark.row("A26")
def test_too_few_nodes_of_the_size_are_told_with_both_numbers(space: Space):
    fleet = space.make_fleet("broad", parallelism={"tensor": 64, "gpusPerNode": 8})
    told = fleet.await_condition("PlacementSatisfied", "False", "NoNodeFits")["message"]
    assert told == "parallelism asks for 8 GPUs on each of 8 nodes but nodes with as many: 4"
    fleet.delete()
    fleet.await_gone()
