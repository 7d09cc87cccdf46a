"""Whole passes over a cluster in memory."""

import base64
import copy
import dataclasses

import pytest

from rolloutfleet.contract.members import Roster
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import (
    BlockedError,
    InvalidSpecError,
    NotFoundError,
    OwnershipConflictError,
    TransientError,
)
from rolloutfleet_operator.reconcile.fleetpass import report_fault, run_pass

KEY = ("rl", "demo")
FLEET = ObjectRef("RolloutFleet", *KEY)


@pytest.fixture
def run(runtime, cluster):
    async def once(failures=0):
        return await run_pass(runtime, KEY, cluster.observe, failures)

    return once


@pytest.fixture
def settle(run, cluster):
    """Passes and kubelets take turns until a pass writes nothing."""

    async def until_quiet(*, ready=True):
        for _ in range(40):
            cluster.run_pods(ready=ready)
            before = len(cluster.writes)
            result = await run()
            if len(cluster.writes) == before:
                return result
        raise AssertionError(f"still writing: {cluster.writes[-10:]}")

    return until_quiet


@pytest.fixture
def fleet(cluster, make_body):
    def put(**spec):
        body = make_body(**spec)
        stored = cluster.objects.get(FLEET)
        if stored is not None:
            body["metadata"]["generation"] = stored["metadata"]["generation"] + 1
            body["status"] = stored.get("status", {})
        return cluster.put(body)

    return put


def condition(cluster, kind, ref=FLEET):
    return next(c for c in cluster.objects[ref]["status"]["conditions"] if c["type"] == kind)


def pods(cluster, role="leader"):
    return [p["metadata"]["name"] for p in cluster.of("Pod") if p["metadata"]["labels"]["rolloutfleet.io/role"] == role]


async def test_a_fleet_gets_all_that_it_needs(cluster, fleet, settle):
    fleet(replicas=2)
    await settle()
    assert pods(cluster) == ["demo-0-0-0", "demo-1-0-0"]
    assert len(pods(cluster, "sync")) == len(cluster.of("Job")) == 1
    names = {(ref.kind, ref.name) for ref in cluster.objects}
    assert names >= {
        ("Secret", "demo-token"),
        ("Service", "demo"),
        ("Service", "demo-engines"),
        ("Service", "demo-sync"),
        ("ConfigMap", "demo-members"),
        ("WeightSync", "demo"),
        ("ServiceAccount", "demo-sync"),
        ("Role", "demo-sync"),
        ("RoleBinding", "demo-sync"),
    }
    assert condition(cluster, "Ready")["status"] == "True"


async def test_a_pass_over_an_unchanged_fleet_writes_nothing_and_tells_nothing(cluster, fleet, settle, run):
    fleet(replicas=2)
    await settle()
    cluster.writes.clear()
    result = await run()
    assert (cluster.writes, result.events, result.wrote_status, result.error) == ([], (), False, None)


async def test_a_stale_view_does_no_harm(cluster, fleet, settle, runtime):
    fleet(replicas=2)
    before = cluster.observe()
    await settle()
    names = pods(cluster)
    await run_pass(runtime, KEY, lambda: before, 0)
    assert pods(cluster) == names


async def test_everything_is_owned_by_the_fleet(cluster, fleet, settle):
    fleet()
    await settle()
    for ref, body in cluster.objects.items():
        if ref != FLEET and body["metadata"].get("labels", {}).get("rolloutfleet.io/role") != "sync-pod":
            (owner,) = body["metadata"]["ownerReferences"]
            assert owner["controller"], ref
            assert owner["kind"] in ("RolloutFleet", "Job"), ref


@pytest.mark.parametrize(("sizes", "last"), [([1, 3, 0], 0), ([3, 1, 2], 2)])
async def test_scaling_follows_the_number(cluster, fleet, settle, sizes, last):
    for size in sizes:
        fleet(replicas=size)
        await settle()
        assert len(pods(cluster)) == size
    assert cluster.objects[FLEET]["status"]["replicas"] == last


async def test_suspending_removes_pods_and_keeps_what_clients_know(cluster, fleet, settle):
    fleet(replicas=2)
    await settle()
    token = cluster.objects[ObjectRef("Secret", "rl", "demo-token")]
    fleet(replicas=2, suspend=True)
    await settle()
    assert (pods(cluster), cluster.of("Job")) == ([], [])
    assert len(cluster.of("Service")) == 3
    assert cluster.objects[ObjectRef("Secret", "rl", "demo-token")] == token
    assert condition(cluster, "Ready")["reason"] == "Suspended"


async def test_a_new_image_replaces_engines_one_by_one(cluster, fleet, settle, run):
    fleet(replicas=3)
    await settle()
    fleet(replicas=3, engine={"image": "worker:2"})
    down = []
    for _ in range(12):
        await run()
        down.append(3 - sum(_serves(pod) for pod in cluster.of("Pod") if pod["metadata"]["name"] in pods(cluster)))
        cluster.run_pods()
    assert max(down) == 1
    assert {p["spec"]["containers"][0]["image"] for p in cluster.of("Pod") if _role(p) == "leader"} == {"worker:2"}


def _serves(pod):
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))


def _role(pod):
    return pod["metadata"]["labels"]["rolloutfleet.io/role"]


async def test_an_engine_that_serves_is_not_ended_for_a_pod_that_the_server_refuses(cluster, fleet, settle, run):
    fleet(replicas=2)
    await settle()
    names = pods(cluster)
    fleet(replicas=2, template={"volumes": [{"name": "v", "wrong": {}}]})
    cluster.refuse["dry-run", "Pod"] = InvalidSpecError("unknown field wrong")
    result = await run()
    assert pods(cluster) == names
    assert isinstance(result.error, InvalidSpecError)
    assert condition(cluster, "Stalled")["reason"] == "InvalidSpec"


async def test_the_roster_follows_the_pods(cluster, fleet, settle):
    fleet(replicas=2)
    await settle()
    data = cluster.objects[ObjectRef("ConfigMap", "rl", "demo-members")]["data"]["members.json"]
    roster = Roster.model_validate_json(data)
    assert [(m.engine, m.pod_name, bool(m.address)) for m in roster.members] == [
        (0, "demo-0-0-0", True),
        (1, "demo-1-0-0", True),
    ]


class TestToken:
    REF = ObjectRef("Secret", "rl", "demo-token")

    async def test_is_made_once(self, cluster, fleet, settle):
        fleet()
        await settle()
        first = cluster.objects[self.REF]["data"]["token"]
        assert len(first) >= 43
        fleet(replicas=2)
        await settle()
        assert cluster.objects[self.REF]["data"]["token"] == first

    async def test_given_by_a_user_is_kept(self, cluster, fleet, settle):
        secret = {"kind": "Secret", "metadata": {"name": "demo-token", "namespace": "rl"}}
        cluster.put(secret | {"data": {"token": base64.b64encode(b"mine").decode()}})
        fleet()
        result = await settle()
        assert (result.error, cluster.objects[self.REF]["data"]["token"]) == (None, base64.b64encode(b"mine").decode())

    async def test_a_foreign_secret_without_a_token_is_a_conflict(self, cluster, fleet, run):
        cluster.put({"kind": "Secret", "metadata": {"name": "demo-token", "namespace": "rl"}})
        fleet()
        assert isinstance((await run()).error, OwnershipConflictError)


class TestOthersObjects:
    async def test_are_neither_adopted_nor_changed(self, cluster, fleet, run):
        mine = {
            "kind": "Service",
            "metadata": {"name": "demo-sync", "namespace": "rl"},
            "spec": {"selector": {"a": "b"}},
        }
        before = copy.deepcopy(cluster.put(mine))
        fleet()
        result = await run()
        assert isinstance(result.error, OwnershipConflictError)
        assert cluster.objects[ObjectRef("Service", "rl", "demo-sync")] == before
        message = condition(cluster, "Stalled")["message"]
        assert message.startswith("Service rl/demo-sync exists and is owned by nobody, not by fleet demo")
        assert pods(cluster), "one step that fails does not keep others from running"

    async def test_of_a_former_fleet_are_waited_for(self, cluster, fleet, run):
        owner = {"kind": "RolloutFleet", "name": "demo", "uid": "former", "controller": True}
        cluster.put({"kind": "Service", "metadata": {"name": "demo", "namespace": "rl", "ownerReferences": [owner]}})
        fleet()
        assert isinstance((await run()).error, BlockedError)
        assert condition(cluster, "Stalled")["status"] == "False"
        assert condition(cluster, "Reconciling")["reason"] == "Blocked"

    async def test_a_changed_service_is_put_right(self, cluster, fleet, settle):
        fleet()
        await settle()
        service = cluster.objects[ObjectRef("Service", "rl", "demo")]
        service["spec"]["selector"] = {"other": "app"}
        await settle()
        assert service["spec"]["selector"]["rolloutfleet.io/role"] == "leader"


class TestWeightSyncs:
    def put(self, cluster, name, created, **status):
        metadata = {"name": name, "namespace": "rl", "creationTimestamp": created}
        body = {"kind": "WeightSync", "metadata": metadata, "spec": {"fleetRef": {"name": "demo"}, "trainer": {}}}
        return cluster.put(body | {"status": status})

    async def test_versions_outlive_the_weightsync_and_the_next_starts_from_them(self, cluster, fleet, settle):
        fleet()
        await settle()
        ref = ObjectRef("WeightSync", "rl", "demo")
        cluster.objects[ref]["status"] |= {"epoch": 4, "version": 7}
        await settle()
        del cluster.objects[ref]
        await settle()
        assert cluster.objects[ref]["spec"]["floor"] == {"epoch": 4, "version": 7}
        assert cluster.objects[FLEET]["status"]["weights"]["version"] == 7

    async def test_take_turns_by_age_and_the_next_learns_what_is_committed(self, cluster, fleet, settle):
        self.put(cluster, "first", "2025-01-01T00:00:00Z", epoch=2, version=3)
        fleet()
        await settle()
        second = ObjectRef("WeightSync", "rl", "demo")
        assert condition(cluster, "Active", second)["reason"] == "WaitingForTurn"
        (job,) = cluster.of("Job")
        assert job["metadata"]["labels"]["rolloutfleet.io/weightsync"] == "first"
        del cluster.objects[ObjectRef("WeightSync", "rl", "first")]
        for pod in pods(cluster, "sync"):
            del cluster.objects[ObjectRef("Pod", "rl", pod)]
        await _until_job_of(cluster, settle, "demo")
        assert condition(cluster, "Active", second)["status"] == "True"
        assert cluster.objects[second]["spec"]["floor"] == {"epoch": 2, "version": 3}
        assert cluster.objects[ObjectRef("Role", "rl", "demo-sync")]["rules"][0]["resourceNames"] == ["demo"]

    async def test_one_that_went_since_the_watches_told_of_it_is_no_error(self, cluster, fleet, settle, run):
        fleet()
        await settle()
        self.put(cluster, "brief", "2030-01-01T00:00:00Z")
        stale = cluster.observe()
        del cluster.objects[ObjectRef("WeightSync", "rl", "brief")]
        cluster.observe = lambda: stale
        assert (await run()).error is None

    async def test_a_name_taken_by_another_fleets_is_a_conflict(self, cluster, fleet, run):
        body = self.put(cluster, "demo", "2025-01-01T00:00:00Z")
        fleet()
        observed = cluster.observe
        body["spec"]["fleetRef"]["name"] = "other"
        cluster.observe = lambda: _without_weightsyncs(observed())
        result = await run()
        assert "WeightSync demo names fleet other" in result.error.message


async def _until_job_of(cluster, settle, weightsync):
    for _ in range(5):
        await settle()
        for name in pods(cluster, "sync"):
            if not any(name.startswith(job["metadata"]["name"]) for job in cluster.of("Job")):
                del cluster.objects[ObjectRef("Pod", "rl", name)]
    (job,) = cluster.of("Job")
    assert job["metadata"]["labels"]["rolloutfleet.io/weightsync"] == weightsync


def _without_weightsyncs(observed):
    return dataclasses.replace(observed, weightsyncs=())


class TestErrors:
    async def test_a_fleet_that_cannot_be_read_ends_the_pass_before_anything_is_touched(
        self, cluster, fleet, settle, run
    ):
        fleet(replicas=2)
        await settle()
        cluster.writes.clear()
        cluster.refuse["get", "RolloutFleet"] = TransientError("down")
        with pytest.raises(TransientError):
            await run()
        assert cluster.writes == []

    async def test_a_server_that_is_away_for_a_moment_is_not_reported(self, cluster, fleet, settle, run):
        fleet()
        await settle()
        cluster.refuse["get", "Secret"] = TransientError("down")
        assert (await run(failures=1)).wrote_status is False
        assert (await run(failures=2)).wrote_status is True
        assert condition(cluster, "Ready")["reason"] == "ApiUnavailable"

    async def test_a_quota_stops_the_creation_of_pods_at_once(self, cluster, fleet, run):
        fleet(replicas=500)
        cluster.refuse["create", "Pod"] = BlockedError("exceeded quota: gpus")
        result = await run()
        assert isinstance(result.error, BlockedError)
        assert condition(cluster, "Reconciling")["message"] == "exceeded quota: gpus"

    async def test_an_invalid_fleet_keeps_its_engines(self, cluster, fleet, settle, run):
        fleet(replicas=2)
        await settle()
        cluster.objects[FLEET]["spec"]["engine"] = {"args": {"port": "1"}}
        result = await run()
        assert isinstance(result.error, InvalidSpecError)
        assert len(pods(cluster)) == 2
        assert condition(cluster, "Stalled")["reason"] == "InvalidSpec"

    async def test_a_fleet_that_is_going_is_left_to_the_garbage_collector(self, cluster, fleet, run):
        fleet()["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
        assert (await run()).gone
        assert cluster.writes == []

    async def test_a_fleet_that_is_gone_is_no_error(self, run):
        assert (await run()).gone

    async def test_a_fault_of_ours_is_reported(self, cluster, fleet, runtime):
        fleet()
        await report_fault(runtime, KEY, RuntimeError("x"), "RuntimeError: x")
        assert condition(cluster, "Stalled")["reason"] == "InternalError"

    async def test_pods_that_vanish_meanwhile_are_no_error(self, cluster, fleet, settle, run):
        fleet(replicas=2)
        await settle()
        fleet(replicas=1)
        cluster.refuse["delete", "Pod"] = NotFoundError("gone")
        assert (await run()).error is None
