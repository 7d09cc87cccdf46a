"""WeightSyncs and their turns, and the epoch and version that a fleet never gives up."""

from collections.abc import Callable

import pytest

from apiserver.harness.api import Body, Cluster, RefusedError, path_of
from apiserver.harness.process import OperatorProcess
from apiserver.harness.space import Fleet, Space, condition, says
from apiserver.harness.syncjob import SyncJobStandIn

pytestmark = pytest.mark.usefixtures("operator")

MakeSyncJob = Callable[..., SyncJobStandIn]


def weightsync(space: Space, name: str, fleet: str) -> Body:
    return {
        "apiVersion": "rolloutfleet.io/v1alpha1",
        "kind": "WeightSync",
        "metadata": {"name": name, "namespace": space.name},
        "spec": {"fleetRef": {"name": fleet}, "trainer": {}},
    }


def await_active(space: Space, name: str, status: str, reason: str) -> str:
    """The message of the condition Active, once it stands so."""
    found = space.cluster.wait(
        f"{name}: Active={status}",
        "WeightSync",
        space.name,
        lambda state: state[name] if name in state and says(state[name], "Active", status, reason) else None,
        name=name,
    )
    return str(condition(found, "Active")["message"])


def await_weights(fleet: Fleet, epoch: int, version: int) -> Body:
    def reached(body: Body) -> bool:
        weights = body["status"].get("weights", {})
        return (weights.get("epoch"), weights.get("version")) == (epoch, version)

    return dict(fleet.await_that(f"epoch {epoch}, version {version}", reached)["status"]["weights"])


def test_every_fleet_has_a_standing_weightsync(space: Space):
    fleet = space.make_fleet("standing")
    fleet.await_ready(1)
    assert await_active(space, "standing", "True", "ServingFleet") == (
        "the sync job of fleet standing works for this object"
    )
    stored = space.cluster.get("WeightSync", space.name, "standing")
    assert stored["spec"] == {"fleetRef": {"name": "standing"}, "trainer": {}, "floor": {"epoch": 0, "version": 0}}
    (owner,) = stored["metadata"]["ownerReferences"]
    assert owner["uid"] == fleet.body()["metadata"]["uid"]
    fleet.delete()


def test_a_second_weightsync_waits_for_its_turn_and_then_works(space: Space):
    fleet = space.make_fleet("turns")
    fleet.await_ready(1)
    space.cluster.create(weightsync(space, "turns-second", "turns"))
    assert await_active(space, "turns-second", "False", "WaitingForTurn") == (
        "WeightSync turns of fleet turns is older and active; delete it to let this one work"
    )
    (job,) = space.cluster.list("Job", space.name, fleet.selector)
    space.cluster.delete("WeightSync", space.name, "turns")
    await_active(space, "turns-second", "True", "ServingFleet")
    assert "turns-second" in await_active(space, "turns", "False", "WaitingForTurn")
    space.cluster.wait(
        "a sync job for the second",
        "Job",
        space.name,
        lambda state: len(state) == 1 and job["metadata"]["name"] not in state and _serves(state, "turns-second"),
        selector=fleet.selector,
    )
    space.cluster.wait(
        "the Role names the second",
        "Role",
        space.name,
        lambda state: state["turns-sync"]["rules"][0]["resourceNames"] == ["turns-second"],
        name="turns-sync",
    )
    fleet.await_ready(1)
    fleet.delete()


def _serves(jobs: dict[str, Body], weightsync: str) -> bool:
    return all(job["metadata"]["labels"]["rolloutfleet.io/weightsync"] == weightsync for job in jobs.values())


def test_a_weightsync_of_a_fleet_that_is_not_there_says_so_until_it_comes(space: Space):
    space.cluster.create(weightsync(space, "early", "late"))
    assert await_active(space, "early", "False", "FleetNotFound") == (
        f"fleetRef.name is late but namespace {space.name} has no RolloutFleet of that name"
    )
    fleet = space.make_fleet("late")
    await_active(space, "early", "True", "ServingFleet")
    fleet.await_ready(1)
    fleet.delete()
    await_active(space, "early", "False", "FleetNotFound")
    space.cluster.delete("WeightSync", space.name, "early")


def test_what_the_sync_job_reports_becomes_the_fleets_and_only_rises(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("rising", replicas=2)
    fleet.await_ready(2)
    reporter = sync_job("rising")
    reporter.report(epoch=1, version=0, engines=2)
    fleet.await_condition("WeightsCurrent", "True", "Current")
    done = {"version": 4, "epoch": 2, "outcome": "Complete", "members": 2, "tensors": 9, "nbytes": 1024}
    reporter.report(epoch=2, version=4, engines=2, admitted=1, lastRefit=done)
    weights = await_weights(fleet, 2, 4)
    assert (weights["target"], weights["skew"]) == (4, 1)
    assert done.items() <= weights["lastRefit"].items()
    told = fleet.await_condition("WeightsCurrent", "False", "EnginesBehind")
    assert told["message"] == "1 of 2 engines do not hold version 4"
    reporter.report(epoch=1, version=3, engines=2)
    fleet.await_condition("WeightsCurrent", "True", "Current")
    assert await_weights(fleet, 2, 4)["lastRefit"]["version"] == 4
    intent = {"epoch": 3, "version": 5}
    reporter.report(epoch=2, version=4, engines=2, intent=intent, phase="Transferring")
    assert await_weights(fleet, 3, 4)["target"] == 5
    failed = {"version": 5, "epoch": 3, "outcome": "Failed", "phase": "Transferring", "member": "rising-0-0-0"}
    reporter.report(epoch=3, version=4, engines=2, lastRefit=failed | {"message": "the deadline passed"})
    fleet.await_that("the failure is told", lambda body: body["status"]["weights"]["lastRefit"]["outcome"] == "Failed")
    space.cluster.wait(
        "an event about the refit that failed",
        "Event",
        space.name,
        lambda events: (
            "refit to version 5 failed while Transferring at rising-0-0-0: the deadline passed"
            in {event["message"] for event in events.values() if event["reason"] == "RefitFailed"}
        ),
    )
    fleet.delete()


def test_random_weights_keep_a_fleet_from_being_current_until_the_first_refit(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("dummy", model={"name": "tiny", "loadFormat": "Dummy"})
    fleet.await_ready(1)
    reporter = sync_job("dummy")
    reporter.report(epoch=0, version=0, engines=1)
    fleet.await_condition("WeightsCurrent", "False", "AwaitingFirstRefit")
    reporter.report(epoch=1, version=1, engines=1)
    fleet.await_condition("WeightsCurrent", "True", "Current")
    fleet.delete()


def test_a_deleted_weightsync_leaves_its_version_to_the_fleet_and_its_successor(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("floor")
    fleet.await_ready(1)
    sync_job("floor").report(epoch=6, version=41, engines=1)
    first = space.cluster.get("WeightSync", space.name, "floor")
    # At once, before the fleet can have taken the version over: the finalizer keeps the object until it has.
    space.cluster.delete("WeightSync", space.name, "floor")
    await_weights(fleet, 6, 41)
    successor = space.cluster.wait(
        "a new standing WeightSync",
        "WeightSync",
        space.name,
        lambda state: state.get("floor", first)["metadata"]["uid"] != first["metadata"]["uid"] and state["floor"],
        name="floor",
    )
    assert successor["spec"]["floor"] == {"epoch": 6, "version": 41}
    await_active(space, "floor", "True", "ServingFleet")
    fleet.await_ready(1)
    assert await_weights(fleet, 6, 41)
    fleet.delete()


def test_the_next_weightsync_starts_from_the_fleets_version(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("handed")
    fleet.await_ready(1)
    space.cluster.create(weightsync(space, "handed-second", "handed"))
    await_active(space, "handed-second", "False", "WaitingForTurn")
    sync_job("handed").report(epoch=2, version=9, engines=1)
    await_weights(fleet, 2, 9)
    space.cluster.delete("WeightSync", space.name, "handed")
    space.cluster.wait(
        "the second has its floor",
        "WeightSync",
        space.name,
        lambda state: state["handed-second"]["spec"]["floor"] == {"epoch": 2, "version": 9},
        name="handed-second",
    )
    await_active(space, "handed-second", "True", "ServingFleet")
    fleet.delete()


def test_the_operator_owns_one_condition_and_the_sync_job_the_rest(space: Space, sync_job: MakeSyncJob):
    fleet = space.make_fleet("fields")
    fleet.await_ready(1)
    await_active(space, "fields", "True", "ServingFleet")
    stored = sync_job("fields").report(epoch=1, version=2, engines=1)
    owned = {
        entry["manager"]: entry["fieldsV1"]["f:status"]
        for entry in stored["metadata"]["managedFields"]
        if entry.get("subresource") == "status"
    }
    assert set(owned["rolloutfleet-operator"]) == {"f:conditions"}
    assert list(owned["rolloutfleet-operator"]["f:conditions"]) == ['k:{"type":"Active"}']
    assert list(owned["rolloutfleet-sync"]["f:conditions"]) == ['k:{"type":"Ready"}']
    assert {c["type"] for c in stored["status"]["conditions"]} == {"Active", "Ready"}
    fleet.delete()


@pytest.fixture
def sync_account(space: Space) -> Cluster:
    """The API server as the sync pod of fleet ``rights`` sees it; another fleet is beside it."""
    fleets = [space.make_fleet(name) for name in ("rights", "other")]
    for fleet in fleets:
        fleet.await_ready(1)
    seen = space.cluster.as_user(space.cluster.token_of(space.name, "rights-sync"))
    yield seen
    seen.close()
    for fleet in fleets:
        fleet.delete()


def test_a_sync_pod_may_write_its_own_weightsyncs_status_and_nothing_else(space: Space, sync_account: Cluster):
    def refused(method: str, path: str, body: Body | None = None, content_type: str = "application/json") -> bool:
        with pytest.raises(RefusedError) as caught:
            sync_account.call(method, path, body, content_type)
        return caught.value.code == 403

    merge = "application/merge-patch+json"
    sync_account.get("WeightSync", space.name, "rights")
    sync_account.get("ConfigMap", space.name, "rights-members")
    sync_account.merge("WeightSync", space.name, "rights", {"status": {"phase": "Ready"}}, "status")
    status = {"status": {"phase": "Ready"}}
    assert refused("PATCH", path_of("WeightSync", space.name, "other", "status"), status, merge)
    assert refused("PATCH", path_of("WeightSync", space.name, "rights"), {"spec": {"floor": {"epoch": 9}}}, merge)
    assert refused("PATCH", path_of("ConfigMap", space.name, "rights-members"), {"data": {}}, merge)
    assert refused("DELETE", path_of("WeightSync", space.name, "rights"))
    for kind, name in (
        ("ConfigMap", "other-members"), ("RolloutFleet", "rights"), ("Secret", "rights-token"),
        ("Pod", "rights-0-0-0"), ("WeightSync", "other"),
    ):  # fmt: skip
        assert refused("GET", path_of(kind, space.name, name))
    for kind in ("ConfigMap", "Pod", "Secret", "WeightSync"):
        assert refused("GET", path_of(kind, space.name))


def test_a_weightsync_that_takes_a_fleets_standing_name_is_a_conflict(space: Space):
    space.cluster.create(weightsync(space, "contested", "someone-else"))
    fleet = space.make_fleet("contested")
    told = fleet.await_condition("Stalled", "True", "OwnershipConflict")["message"]
    assert told == "WeightSync contested names fleet someone-else, and fleet contested needs that name; delete it"
    space.cluster.delete("WeightSync", space.name, "contested")
    await_active(space, "contested", "True", "ServingFleet")
    fleet.patch(template={"terminationGracePeriodSeconds": 1})
    fleet.await_ready(1)
    fleet.delete()


def test_the_operator_had_nothing_to_complain_about(operator: OperatorProcess):
    expected = ("Blocked", "Conflict", "OwnershipConflict")
    assert [record for record in operator.troubles() if record.get("reason") not in expected] == []
