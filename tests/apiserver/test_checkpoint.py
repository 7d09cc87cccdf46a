"""A checkpoint's Job and WeightSync against a real API server and its Job controller; the Job's pod is simulated, and ends as told."""

from collections.abc import Callable
from typing import Any

import pytest

from apiserver.harness.api import Body
from apiserver.harness.space import Fleet, Space, condition
from apiserver.harness.syncjob import SyncJobStandIn
from rolloutfleet_operator import naming

pytestmark = pytest.mark.usefixtures("operator")

MakeSyncJob = Callable[..., SyncJobStandIn]
URI = "s3://bucket/run"


def ask(fleet: Fleet, version: int, **fields: Any) -> None:
    fleet.patch(weights={"checkpoint": {"version": version, "uri": URI, **fields}})


def await_job(space: Space, name: str) -> Body:
    found = space.cluster.wait(f"Job {name}", "Job", space.name, lambda state: state.get(name), name=name)
    return dict(found)


def await_sync(space: Space, name: str, phase: str) -> Body:
    def reached(state: dict[str, Body]) -> Body | None:
        stored = state.get(name)
        return stored if stored and stored.get("status", {}).get("phase") == phase else None

    return dict(space.cluster.wait(f"{name}: {phase}", "WeightSync", space.name, reached, name=name))


def end_pod(space: Space, job: str, exit_code: int, message: str = "") -> None:
    """What the kubelet says when the Job's container has ended."""
    selector = f"job-name={job}"
    pods = space.cluster.wait(
        f"a pod of {job} runs",
        "Pod",
        space.name,
        lambda state: [pod for pod in state.values() if pod.get("status", {}).get("phase") == "Running"],
        selector=selector,
    )
    (pod,) = pods
    ended = {"exitCode": exit_code, "message": message, "reason": "Error" if exit_code else "Completed"}
    status = {
        "phase": "Failed" if exit_code else "Succeeded",
        "containerStatuses": [
            {
                "name": "checkpoint",
                "image": "i",
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "started": False,
                "state": {"terminated": ended},
            }
        ],
    }
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod["metadata"]["name"], "namespace": space.name},
        "status": status,
    }
    space.cluster.apply(manifest, "kubelet", "status")


def test_a_checkpoint_is_sent_once_and_its_record_outlives_the_job(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("sent", replicas=2)
    fleet.await_ready(2)
    sync = sync_job("sent")
    sync.report(epoch=0, version=0, engines=2, session={"id": "s", "trainer": "ppo"})
    ask(fleet, 3)
    waiting = fleet.await_condition("WeightsCurrent", "False", "CheckpointRefit")
    assert "trainer ppo holds the fleet" in waiting["message"]
    sync.report(epoch=0, version=0, engines=2)
    job = await_job(space, "sent-checkpoint-3")
    pod = job["spec"]["template"]["spec"]
    assert (pod["automountServiceAccountToken"], pod["securityContext"]["runAsNonRoot"]) == (False, True)
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [3, 4]
    sync.report(epoch=2, version=3, engines=2)
    end_pod(space, "sent-checkpoint-3", 0)
    stored = await_sync(space, "sent-checkpoint-3", "Complete")
    assert stored["metadata"]["ownerReferences"][0]["name"] == "sent"
    fleet.await_condition("WeightsCurrent", "True", "Current")
    space.cluster.delete("Job", space.name, "sent-checkpoint-3")
    fleet.patch(replicas=2, weights={"checkpoint": {"version": 4, "uri": f"{URI}/4"}})
    await_job(space, "sent-checkpoint-4")
    gone = space.cluster.wait(
        "the former record goes", "WeightSync", space.name, lambda state: "sent-checkpoint-3" not in state
    )
    assert gone
    fleet.delete()


def test_a_job_that_ends_for_good_stalls_the_fleet_in_its_own_words(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("bad", replicas=1)
    fleet.await_ready(1)
    sync_job("bad").report(epoch=0, version=0, engines=1)
    ask(fleet, 1)
    await_job(space, "bad-checkpoint-1")
    end_pod(space, "bad-checkpoint-1", 4, "tensor a ends at byte 9: the file was cut off")
    stalled = fleet.await_condition("Stalled", "True", "CheckpointFailed")
    assert stalled["message"] == "Job bad-checkpoint-1 failed: tensor a ends at byte 9: the file was cut off"
    assert condition(fleet.body(), "WeightsCurrent")["message"] == stalled["message"]
    assert condition(fleet.body(), "Ready")["status"] == "True"
    await_sync(space, "bad-checkpoint-1", "Failed")
    ask(fleet, 1, secretRef={"name": "bucket"})
    before = space.cluster.wait(
        "another Job of that name",
        "Job",
        space.name,
        lambda state: (
            (job := state.get("bad-checkpoint-1"))
            and "envFrom" in job["spec"]["template"]["spec"]["containers"][0]
            and job
        ),
        name="bad-checkpoint-1",
    )
    assert before["metadata"]["labels"][naming.LABEL_ROLE] == naming.ROLE_CHECKPOINT
    fleet.delete()
