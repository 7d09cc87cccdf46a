"""Engines that fail again and again, and nodes that are drained or about to go; what the kubelet would say is said for it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from apiserver.harness.api import Body
from apiserver.harness.process import LEASE, OperatorProcess
from apiserver.harness.space import Fleet, Space, condition, pod_is_ready, says

Launch = Callable[..., OperatorProcess]

ANOTHER_TRY = "rolloutfleet.io/revive"


def engine_of(pod: Body) -> str:
    return str(pod["metadata"]["labels"]["rolloutfleet.io/engine"])


def pod_of(fleet: Fleet, engine: int) -> Body:
    return next(pod for pod in fleet.pods().values() if engine_of(pod) == str(engine))


def fail(space: Space, pod: Body, times: int) -> None:
    """The pod's container has ended with an error so often, and waits for the next try."""
    ended = {"exitCode": 1, "message": "CUDA error: an illegal memory access", "reason": "Error"}
    ended |= {"startedAt": _ago(20), "finishedAt": _ago(1)}
    statuses = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": False,
            "started": False,
            "restartCount": times,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
        for container in pod["spec"]["containers"]
    ]
    known = [c for c in pod["status"]["conditions"] if c["type"] not in ("Ready", "ContainersReady")]
    unready = [
        {"type": kind, "status": "False", "lastTransitionTime": _ago(0)} for kind in ("Ready", "ContainersReady")
    ]
    status = {"containerStatuses": statuses, "conditions": [*known, *unready]}
    space.cluster.merge("Pod", space.name, pod["metadata"]["name"], {"status": status}, "status")


def _ago(seconds: int) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def revive(space: Space, fleet: Fleet, value: str) -> None:
    annotation = {"metadata": {"annotations": {ANOTHER_TRY: value}}}
    space.cluster.merge("RolloutFleet", space.name, fleet.name, annotation)


def await_event(space: Space, fleet: Fleet, reason: str) -> None:
    def told(events: dict[str, Body]) -> bool:
        return any((e["involvedObject"]["name"], e["reason"]) == (fleet.name, reason) for e in events.values())

    space.cluster.wait(f"event {reason}", "Event", space.name, told)


def test_a_retired_engine_stays_retired_under_the_next_operator_until_it_is_revived(space: Space, launch: Launch):
    first = launch()
    first.await_lease()
    fleet = space.make_fleet(
        "budget", replicas=2, recovery={"restartBudget": 2, "quarantineNodes": {"afterFailures": 0}}
    )
    fleet.await_ready(2)
    failing = pod_of(fleet, 1)
    fail(space, failing, 2)
    fleet.await_condition("Ready", "False", "EngineFailing")
    assert fleet.body()["status"]["recovery"]["engines"][0]["engine"] == 1
    fail(space, failing, 3)
    told = fleet.await_condition("Stalled", "True", "EngineRetired")["message"]
    assert "engine 1 is retired after more than 2 failures within 3600 s" in told
    assert "CUDA error: an illegal memory access" in told
    assert told.endswith("; 1 of 2 engines serve")
    fleet.await_pods(lambda pods: [engine_of(pod) for pod in pods.values()] == ["0"])
    roster = fleet.roster()
    assert (roster["engines"], roster["retired"], [m["engine"] for m in roster["members"]]) == (1, [1], [0])
    assert says(fleet.body(), "Reconciling", "False")
    await_event(space, fleet, "EngineRetired")
    first.kill()
    space.release_lease(LEASE)
    launch().await_lease()
    generation = fleet.patch(refit={"pause": "Wait"})["metadata"]["generation"]
    fleet.await_that("another pass", lambda found: found["status"]["observedGeneration"] == generation)
    assert condition(fleet.body(), "Ready")["reason"] == "EngineRetired"
    assert len(fleet.pods()) == 1
    revive(space, fleet, "monday")
    body = fleet.await_ready(2)
    assert body["status"]["recovery"] == {"engines": [], "quarantinedNodes": [], "revived": "monday"}
    await_event(space, fleet, "EngineRevived")
    assert "retired" not in fleet.roster()
    fleet.delete()
    fleet.await_gone()


@pytest.mark.usefixtures("operator")
class TestWithOneOperator:
    def test_an_engine_that_fails_on_one_node_moves_to_another_and_the_node_is_avoided(self, space: Space):
        fleet = space.make_fleet("bad-node", replicas=2, parallelism={"tensor": 5})
        fleet.await_ready(2)
        failing = pod_of(fleet, 1)
        node = failing["spec"]["nodeName"]
        fail(space, failing, 3)
        fleet.await_pods(
            lambda pods: (
                len(pods) == 2
                and all(pod_is_ready(pod) and pod["spec"].get("nodeName") != node for pod in pods.values())
            )
        )
        fleet.await_ready(2)
        (avoided,) = fleet.body()["status"]["recovery"]["quarantinedNodes"]
        assert (avoided["node"], avoided["failures"]) == (node, 3)
        await_event(space, fleet, "NodeQuarantined")
        revive(space, fleet, "monday")
        fleet.await_that("nothing is avoided", lambda body: not body["status"]["recovery"].get("quarantinedNodes"))
        fleet.delete()
        fleet.await_gone()

    def test_an_engine_on_a_node_with_a_spot_notice_gets_its_successor_before_it_goes(self, space: Space):
        fleet = space.make_fleet("spot", replicas=2, parallelism={"tensor": 5})
        fleet.await_ready(2)
        before = fleet.pods()
        leaving = pod_of(fleet, 0)
        node = leaving["spec"]["nodeName"]
        taint = {"key": "aws-node-termination-handler/spot-itn", "value": "1", "effect": "NoSchedule"}
        numbers = []
        try:
            space.cluster.merge("Node", "", node, {"spec": {"taints": [*_taints(space, node), taint]}})

            def moved(pods: dict[str, Body]) -> bool:
                numbers.append(sum(pod_is_ready(pod) for pod in pods.values()))
                return len(pods) == 2 and all(
                    pod_is_ready(pod) and pod["spec"].get("nodeName") != node for pod in pods.values()
                )

            fleet.await_pods(moved)
            assert min(numbers) == 2
            after = pod_of(fleet, 0)
            assert after["metadata"]["name"] == f"spot-0-0-{int(leaving['metadata']['name'][-1]) + 1}"
            untouched = pod_of(fleet, 1)["metadata"]["uid"]
            assert untouched in {pod["metadata"]["uid"] for pod in before.values()}
        finally:
            space.cluster.merge("Node", "", node, {"spec": {"taints": _taints(space, node, but=taint["key"])}})
        fleet.await_ready(2)
        fleet.delete()
        fleet.await_gone()

    def test_an_engine_that_is_evicted_is_replaced_and_has_not_failed(self, space: Space):
        fleet = space.make_fleet("drained", replicas=2)
        fleet.await_ready(2)
        pod = pod_of(fleet, 0)
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod["metadata"]["name"], "namespace": space.name},
        }
        path = f"/api/v1/namespaces/{space.name}/pods/{pod['metadata']['name']}/eviction"
        space.cluster.call("POST", path, eviction)
        fleet.await_pods(
            lambda pods: (
                len(pods) == 2
                and pod["metadata"]["uid"] not in {each["metadata"]["uid"] for each in pods.values()}
                and all(pod_is_ready(each) for each in pods.values())
            )
        )
        assert "recovery" not in fleet.await_ready(2)["status"]
        fleet.delete()
        fleet.await_gone()

    def test_a_disruption_budget_of_the_users_own_counts_the_fleets_engines(self, space: Space):
        fleet = space.make_fleet("budgeted", replicas=3)
        fleet.await_ready(3)
        selector = {"matchLabels": dict(pair.split("=") for pair in fleet.leaders.split(","))}
        spec = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
        metadata = {"name": "budgeted", "namespace": space.name}
        budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}
        space.cluster.create(budget)

        def counted(budgets: dict[str, Body]) -> bool:
            status = budgets.get("budgeted", {}).get("status", {})
            return (status.get("expectedPods"), status.get("disruptionsAllowed")) == (3, 1)

        space.cluster.wait("the budget is counted", "PodDisruptionBudget", space.name, counted)
        space.cluster.delete("PodDisruptionBudget", space.name, "budgeted")
        fleet.delete()
        fleet.await_gone()

    def test_engines_and_sync_job_leave_a_lost_node_soon_unless_the_user_says_otherwise(self, space: Space):
        own = {
            "key": "node.kubernetes.io/not-ready",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 900,
        }
        fleet = space.make_fleet(
            "patience",
            recovery={"nodeLossSeconds": 12},
            template={"nodeSelector": {"type": "kwok"}, "tolerations": [own]},
        )
        fleet.await_ready(1)
        engine, sync = pod_of(fleet, 0), *fleet.pods(f"{fleet.selector},rolloutfleet.io/role=sync").values()
        assert _patience(engine) == {"node.kubernetes.io/not-ready": 900, "node.kubernetes.io/unreachable": 12}
        assert set(_patience(sync).values()) == {5}
        fleet.delete()
        fleet.await_gone()


def _taints(space: Space, node: str, but: str = "") -> list[Body]:
    taints = space.cluster.get("Node", "", node)["spec"].get("taints", [])
    return [taint for taint in taints if taint["key"] != but]


def _patience(pod: Body) -> dict[str, int]:
    return {t["key"]: t["tolerationSeconds"] for t in pod["spec"]["tolerations"] if "tolerationSeconds" in t}
