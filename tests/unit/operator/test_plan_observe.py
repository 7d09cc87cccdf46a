"""What is kept of raw objects."""

import pytest

from rolloutfleet_operator.plan.observe import (
    fleet_key,
    observe_child,
    observe_fleet,
    observe_job,
    observe_node,
    observe_pod,
    observe_weightsync,
)

METADATA = {
    "name": "demo-2-0-5",
    "namespace": "rl",
    "uid": "u",
    "creationTimestamp": "2026-01-02T03:04:05Z",
    "labels": {
        "rolloutfleet.io/fleet": "demo",
        "rolloutfleet.io/role": "leader",
        "rolloutfleet.io/engine": "2",
        "rolloutfleet.io/rank": "0",
        "rolloutfleet.io/incarnation": "5",
        "rolloutfleet.io/revision": "abc",
    },
    "annotations": {"rolloutfleet.io/ranks": "8"},
    "ownerReferences": [{"kind": "Other", "uid": "o"}, {"kind": "RolloutFleet", "uid": "f", "controller": True}],
}


def test_a_pod_says_who_it_is(now):
    pod = observe_pod({"metadata": METADATA, "spec": {}, "status": {"phase": "Pending"}})
    assert (pod.engine, pod.incarnation, pod.revision, pod.ranks, pod.owner_uid, pod.role) == (
        2,
        5,
        "abc",
        8,
        "f",
        "leader",
    )
    assert (pod.created, pod.ready, pod.live) == (now, False, True)


def test_a_pod_that_is_being_deleted_is_not_live():
    assert not observe_pod({"metadata": METADATA | {"deletionTimestamp": "2026-01-02T03:04:05Z"}}).live


def test_a_pod_without_a_place_carries_the_schedulers_words():
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]
    assert observe_pod({"metadata": METADATA, "status": {"conditions": conditions}}).unschedulable == "0/3 nodes"


def test_a_pod_whose_volumes_are_missing_is_told_apart_from_one_that_pulls():
    conditions = [{"type": "PodReadyToStartContainers", "status": "False"}]
    body = {"metadata": METADATA, "spec": {"nodeName": "n"}, "status": {"conditions": conditions}}
    assert observe_pod(body).sandbox_missing


@pytest.mark.parametrize("where", ["state", "lastState"])
def test_the_last_end_of_a_container_is_kept_with_its_own_words(where):
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "ValueError: no\n"}}
    status = {"containerStatuses": [{"restartCount": 2, where: ended}]}
    state = observe_pod({"metadata": METADATA, "status": status}).container
    assert (state.restarts, state.exit_code, state.exit_reason, state.exit_message) == (2, 1, "Error", "ValueError: no")


def test_an_evicted_pod_keeps_the_reason_of_the_pod():
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    pod = observe_pod({"metadata": METADATA, "status": status})
    assert (pod.dead, pod.container.exit_reason, pod.container.exit_message) == (True, "Evicted", "low on memory")


def test_of_a_long_message_the_end_is_kept():
    ended = {"terminated": {"exitCode": 1, "message": "x" * 5000 + "the cause"}}
    pod = observe_pod({"metadata": METADATA, "status": {"containerStatuses": [{"state": ended}]}})
    assert pod.container.exit_message.endswith("xthe cause")
    assert len(pod.container.exit_message) < 1100


def test_events_that_change_nothing_give_equal_values():
    first = {"metadata": METADATA | {"resourceVersion": "1", "managedFields": [{}]}, "status": {"phase": "Running"}}
    second = {"metadata": METADATA | {"resourceVersion": "2"}, "status": {"phase": "Running", "startTime": "now"}}
    assert observe_pod(first) == observe_pod(second)


def test_a_job_says_how_it_ended():
    conditions = [{"type": "Failed", "status": "True", "message": "too often"}, {"type": "Complete", "status": "False"}]
    job = observe_job({"metadata": METADATA, "status": {"conditions": conditions}})
    assert (job.finished, job.message) == ("Failed", "too often")
    assert observe_job({"metadata": METADATA}).finished == ""


def test_a_node_offers_whole_extended_resources():
    allocatable = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8", "rdma/ib": "1"}
    node = observe_node({"metadata": {"name": "n"}, "status": {"allocatable": allocatable}})
    assert node.extended == (("nvidia.com/gpu", 8), ("rdma/ib", 1))


def test_a_child_keeps_its_content_and_not_the_servers_bookkeeping():
    body = {"metadata": METADATA | {"resourceVersion": "1", "managedFields": []}, "data": {"a": "b"}, "status": {}}
    child = observe_child("ConfigMap", body)
    assert child.content["data"] == {"a": "b"}
    assert not {"resourceVersion", "managedFields", "uid"} & set(child.content["metadata"])
    assert "status" not in child.content


def test_a_weightsync_keeps_floor_and_status():
    sync = observe_weightsync({"metadata": METADATA, "spec": {"floor": {"epoch": 2}}, "status": {"version": 3}})
    assert (sync.floor_epoch, sync.floor_version, sync.status) == (2, 0, {"version": 3})


def test_a_fleet_brief_holds_its_weights():
    brief = observe_fleet({"metadata": METADATA, "status": {"weights": {"epoch": 2, "version": 3}}})
    assert (brief.epoch, brief.version, brief.terminating) == (2, 3, False)


def test_unlabelled_objects_belong_to_no_fleet():
    assert fleet_key({"metadata": METADATA}) == ("rl", "demo")
    assert fleet_key({"metadata": {"name": "x", "namespace": "rl"}}) is None
