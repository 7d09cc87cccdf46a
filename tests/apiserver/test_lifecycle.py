"""A fleet from its creation to its end, as its conditions, pods and children tell it."""

import json

import pytest

from apiserver.harness.api import Body
from apiserver.harness.process import OPERATOR_IMAGE, OperatorProcess
from apiserver.harness.simulation import IMAGE, STUCK_IMAGE
from apiserver.harness.space import CHILD_KINDS, Fleet, Space, condition, pod_is_ready, roster_of, says

pytestmark = pytest.mark.usefixtures("operator")

SECOND_IMAGE = "registry.example/worker:2"


def image_of(pod: Body) -> str:
    return str(pod["spec"]["containers"][0]["image"])


@pytest.mark.row("A01", "A03", "A18")
def test_a_fleet_becomes_the_pods_that_its_shape_asks_for(space: Space):
    fleet = space.make_fleet("shape", replicas=3, parallelism={"tensor": 2}, engine={"args": {"max-num-seqs": "8"}})
    body = fleet.await_ready(3)
    pods = fleet.pods()
    assert sorted(pods) == ["shape-0-0-0", "shape-1-0-0", "shape-2-0-0"]
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        assert {"--tensor-parallel-size=2", "--max-num-seqs=8"} <= set(container["args"])
        assert container["image"] == IMAGE
        assert pod["spec"]["nodeName"].startswith("simulated-")
    ranks = [member["ranks"] for member in fleet.roster()["members"]]
    assert sum(ranks) == body["spec"]["replicas"] * body["spec"]["parallelism"]["tensor"]
    states = {c["type"]: (c["status"], c["reason"]) for c in body["status"]["conditions"]}
    assert states == {
        "PlacementSatisfied": ("True", "Placed"),
        "Ready": ("True", "AllEnginesReady"),
        "Reconciling": ("False", "Settled"),
        "Stalled": ("False", "Settled"),
        "WeightsCurrent": ("Unknown", "NoReport"),
    }
    assert body["status"]["observedGeneration"] == body["metadata"]["generation"]
    space.cluster.wait(
        "the event of becoming Ready",
        "Event",
        space.name,
        lambda events: "AllEnginesReady" in {e["reason"] for e in events.values() if e["involvedObject"]["name"] == "shape"},
    )  # fmt: skip
    fleet.delete()


@pytest.mark.row("A27")
def test_the_address_of_every_engine_that_serves_is_published(space: Space):
    fleet = space.make_fleet("addresses", replicas=2)
    body = fleet.await_ready(2)
    tail = f"{space.name}.svc"
    assert body["status"]["endpoints"] == {
        "generation": f"http://addresses.{tail}:8000",
        "sync": f"http://addresses-sync.{tail}:8080",
        "engines": [f"http://addresses-{n}-0-0.addresses-engines.{tail}:8000" for n in range(2)],
    }
    space.cluster.wait(
        "the Service leads to both",
        "EndpointSlice",
        space.name,
        lambda state: ready_targets(state) == {"addresses-0-0-0", "addresses-1-0-0"},
        selector="kubernetes.io/service-name=addresses",
    )
    set_ready(fleet, "addresses-1-0-0", ready=False)
    left = fleet.await_that("one engine", lambda found: len(found["status"]["endpoints"]["engines"]) == 1)
    assert left["status"]["endpoints"]["engines"] == [f"http://addresses-0-0-0.addresses-engines.{tail}:8000"]
    space.cluster.wait(
        "the Service leads to one",
        "EndpointSlice",
        space.name,
        lambda state: ready_targets(state) == {"addresses-0-0-0"},
        selector="kubernetes.io/service-name=addresses",
    )
    fleet.delete()


def ready_targets(pieces: dict[str, Body]) -> set[str]:
    endpoints = [endpoint for piece in pieces.values() for endpoint in piece.get("endpoints") or ()]
    return {endpoint["targetRef"]["name"] for endpoint in endpoints if endpoint["conditions"]["ready"]}


def set_ready(fleet: Fleet, pod: str, *, ready: bool) -> None:
    """What a kubelet would report after its readiness probe changed its mind."""
    state = "True" if ready else "False"
    body = fleet.cluster.get("Pod", fleet.namespace, pod)
    conditions = [
        {**c, "status": state} if c["type"] in ("Ready", "ContainersReady") else c for c in body["status"]["conditions"]
    ]
    containers = [{**c, "ready": ready} for c in body["status"]["containerStatuses"]]
    patch = {"status": {"conditions": conditions, "containerStatuses": containers}}
    fleet.cluster.merge("Pod", fleet.namespace, pod, patch, "status")


def test_conditions_go_back_when_they_stop_being_true(space: Space):
    fleet = space.make_fleet("back", replicas=2)
    before = condition(fleet.await_ready(2), "Ready")
    set_ready(fleet, "back-1-0-0", ready=False)
    fallen = fleet.await_condition("Ready", "False", "EnginesStarting")
    assert fallen["message"].endswith("1 of 2 engines serve")
    assert fallen["lastTransitionTime"] >= before["lastTransitionTime"]
    assert says(fleet.body(), "Reconciling", "True", "EnginesStarting")
    set_ready(fleet, "back-1-0-0", ready=True)
    fleet.await_ready(2)
    (sync_pod,) = fleet.pods(f"{fleet.selector},rolloutfleet.io/role=sync")
    set_ready(fleet, sync_pod, ready=False)
    assert sync_pod in fleet.await_condition("Ready", "False", "SyncNotReady")["message"]
    set_ready(fleet, sync_pod, ready=True)
    fleet.await_ready(2)
    fleet.delete()


def test_an_engine_that_fails_again_and_again_stalls_the_fleet_in_its_own_words(space: Space):
    fleet = space.make_fleet("failing", engine={"image": STUCK_IMAGE})
    fleet.await_pods(lambda pods: [p for p in pods.values() if p["status"].get("podIP")])
    ended = {"exitCode": 1, "reason": "Error", "message": "ValueError: no such model", "containerID": "x://1"}
    status = {
        "name": "engine", "image": STUCK_IMAGE, "imageID": "", "ready": False, "started": False, "restartCount": 2,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended},
    }  # fmt: skip
    space.cluster.merge("Pod", space.name, "failing-0-0-0", {"status": {"containerStatuses": [status]}}, "status")
    told = fleet.await_condition("Stalled", "True", "EngineFailing")["message"]
    assert (
        told == "pod failing-0-0-0 was restarted 2 times: exit code 1: ValueError: no such model; 0 of 1 engines serve"
    )
    fleet.patch(engine={"image": IMAGE})
    fleet.await_ready(1)
    assert says(fleet.body(), "Stalled", "False")
    fleet.delete()


def test_scaling_to_three_and_to_none_and_by_the_scale_subresource(space: Space):
    fleet = space.make_fleet("scale")
    fleet.await_ready(1)
    (first,) = fleet.pods().values()
    fleet.patch(replicas=3)
    fleet.await_ready(3)
    assert fleet.pods()["scale-0-0-0"]["metadata"]["uid"] == first["metadata"]["uid"]
    fleet.patch(replicas=0)
    body = fleet.await_ready(0)
    assert condition(body, "PlacementSatisfied")["reason"] == "NothingRuns"
    assert fleet.roster()["members"] == []
    space.cluster.merge("RolloutFleet", space.name, "scale", {"spec": {"replicas": 2}}, "scale")
    fleet.await_ready(2)
    scale = space.cluster.get("RolloutFleet", space.name, "scale", "scale")
    assert scale["status"]["replicas"] == 2
    assert set(fleet.pods(scale["status"]["selector"])) == set(fleet.pods())
    fleet.delete()


def test_a_suspended_fleet_keeps_its_token_and_services_and_comes_back(space: Space):
    fleet = space.make_fleet("pause", replicas=2)
    fleet.await_ready(2)
    kept = {name: uid for name, uid in fleet.child_uids().items() if not name.startswith(("Pod/", "Job/"))}
    token = space.cluster.get("Secret", space.name, "pause-token")["data"]
    fleet.patch(suspend=True)
    fleet.await_condition("Ready", "False", "Suspended")
    fleet.await_pods(lambda pods: not pods, fleet.selector)
    space.cluster.await_gone("Job", space.name, selector=fleet.selector)
    body = fleet.await_that("nothing under way", lambda found: says(found, "Reconciling", "False"))
    assert body["status"]["replicas"] == 0
    assert fleet.child_uids() == kept
    fleet.patch(suspend=False)
    fleet.await_ready(2)
    assert kept.items() <= fleet.child_uids().items()
    assert space.cluster.get("Secret", space.name, "pause-token")["data"] == token
    fleet.delete()


def test_a_new_image_reaches_engines_one_at_a_time(space: Space):
    fleet = space.make_fleet("roll", replicas=3)
    fleet.await_ready(3)
    fleet.patch(engine={"image": SECOND_IMAGE})
    serving: list[int] = []

    def renewed(pods: dict[str, Body]) -> bool:
        serving.append(sum(pod_is_ready(pod) for pod in pods.values()))
        return len(pods) == 3 and all(pod_is_ready(p) and image_of(p) == SECOND_IMAGE for p in pods.values())

    fleet.await_pods(renewed)
    fleet.await_ready(3)
    assert min(serving) == 2
    assert "EnginesUpdating" in fleet.event_reasons()
    fleet.delete()


def test_engines_of_the_old_image_stay_while_the_first_new_one_is_not_ready(space: Space):
    fleet = space.make_fleet("stuck", replicas=3)
    fleet.await_ready(3)
    old = {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items() if name != "stuck-0-0-0"}
    fleet.patch(engine={"image": STUCK_IMAGE})
    fleet.await_condition("Ready", "False", "EnginesUpdating")
    body = fleet.await_that("the new pod is seen", lambda found: found["status"]["updatedReplicas"] == 1)
    assert "2 of 3 engines still have an older revision" in condition(body, "Ready")["message"]
    # A pass of its own: what serves is let alone by it too.
    fleet.patch(template={"terminationGracePeriodSeconds": 1})
    fleet.await_that(
        "another pass", lambda found: found["status"]["observedGeneration"] > body["metadata"]["generation"]
    )
    pods = fleet.await_pods(lambda pods: len(pods) == 3 and pods)
    assert {name: pod["metadata"]["uid"] for name, pod in pods.items() if pod_is_ready(pod)} == old
    fleet.patch(engine={"image": SECOND_IMAGE})
    fleet.await_ready(3)
    fleet.delete()


def test_a_pod_deleted_by_hand_is_replaced_and_others_are_not_touched(space: Space):
    fleet = space.make_fleet("by-hand", replicas=2)
    fleet.await_ready(2)
    before = fleet.pods()
    space.cluster.delete("Pod", space.name, "by-hand-0-0-0")
    gone, kept = (before[f"by-hand-{engine}-0-0"]["metadata"]["uid"] for engine in range(2))
    fleet.await_pods(lambda pods: len(pods) == 2 and gone not in {pod["metadata"]["uid"] for pod in pods.values()})
    fleet.await_ready(2)
    after = {pod["metadata"]["uid"]: name for name, pod in fleet.pods().items()}
    assert after[kept] == "by-hand-1-0-0"
    space.cluster.wait(
        "the roster names both",
        "ConfigMap",
        space.name,
        lambda state: {m["podUid"]: m["podName"] for m in roster_of(state["by-hand-members"])["members"]} == after,
        name="by-hand-members",
    )
    fleet.delete()


@pytest.mark.parametrize("kind", [kind for kind in CHILD_KINDS if kind not in ("Pod", "WeightSync")])
def test_a_child_deleted_by_hand_comes_back(space: Space, kind: str):
    fleet = space.make_fleet(f"heal-{kind.lower()}")
    fleet.await_ready(1)
    before = {name: uid for name, uid in fleet.child_uids().items() if name.startswith(f"{kind}/")}
    for child in before:
        space.cluster.delete(kind, space.name, child.partition("/")[2])
    fleet.patch(template={"terminationGracePeriodSeconds": 5})
    names = sorted(child.partition("/")[2] for child in before)
    fleet.cluster.wait(
        f"every {kind} is back",
        kind,
        space.name,
        lambda state: (
            sorted(state) == names and not set(before.values()) & {b["metadata"]["uid"] for b in state.values()}
        ),
        selector=fleet.selector,
    )
    fleet.await_ready(1)
    fleet.delete()


def test_a_child_changed_by_hand_is_what_it_was_again(space: Space):
    fleet = space.make_fleet("drift")
    fleet.await_ready(1)
    selector = {"spec": {"selector": {"rolloutfleet.io/fleet": "other"}}}
    space.cluster.merge("Service", space.name, "drift", selector)
    space.cluster.wait(
        "the selector is right again",
        "Service",
        space.name,
        lambda state: state["drift"]["spec"]["selector"]["rolloutfleet.io/fleet"] == "drift",
        name="drift",
    )
    rules = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]
    space.cluster.merge("Role", space.name, "drift-sync", {"rules": rules})
    space.cluster.wait(
        "the Role grants no more than it should",
        "Role",
        space.name,
        lambda state: all("secrets" not in rule["resources"] for rule in state["drift-sync"]["rules"]),
        name="drift-sync",
    )
    fleet.delete()


def test_one_sync_job_runs_and_a_new_policy_waits_for_the_old_one_to_end(space: Space):
    fleet = space.make_fleet("policy")
    fleet.await_ready(1)
    selector = f"{fleet.selector},rolloutfleet.io/role=sync"
    ((first, pod),) = fleet.pods(selector).items()
    assert pod["spec"]["containers"][0]["image"] == OPERATOR_IMAGE
    fleet.patch(refit={"pause": "Abort"})
    living: list[int] = []

    def replaced(pods: dict[str, Body]) -> bool:
        living.append(len([pod for pod in pods.values() if "deletionTimestamp" not in pod["metadata"]]))
        return len(pods) == 1 and first not in pods and all(pod_is_ready(pod) for pod in pods.values())

    fleet.await_pods(replaced, selector)
    assert max(living) == 1
    fleet.await_ready(1)
    assert len(space.cluster.list("Job", space.name, fleet.selector)) == 1
    fleet.delete()


@pytest.mark.row("A54")
def test_a_deleted_fleet_takes_everything_with_it(space: Space):
    fleet = space.make_fleet("ending", replicas=2)
    fleet.await_ready(2)
    kinds = {name.partition("/")[0] for name in fleet.child_uids()}
    assert kinds == set(CHILD_KINDS)
    fleet.delete()
    fleet.await_gone()


def test_a_fleet_made_again_under_its_name_starts_afresh(space: Space):
    fleet = space.make_fleet("again")
    fleet.await_ready(1)
    former = set(fleet.child_uids().values())
    token = space.cluster.get("Secret", space.name, "again-token")["data"]
    fleet.delete()
    fleet.cluster.await_gone("RolloutFleet", space.name, "again")
    again = space.make_fleet("again")
    again.await_ready(1, seconds=60)
    assert not former & set(again.child_uids().values())
    assert space.cluster.get("Secret", space.name, "again-token")["data"] != token
    again.delete()


def test_the_operator_had_nothing_to_complain_about(operator: OperatorProcess):
    unexpected = [record for record in operator.troubles() if record.get("reason") not in ("Blocked", "Conflict")]
    assert not unexpected, json.dumps(unexpected)
