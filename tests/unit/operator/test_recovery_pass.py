"""Engines that fail again and again, over whole passes; every pass could be another operator's first."""

import pytest

from rolloutfleet.contract.members import Roster
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.reconcile.fleetpass import run_pass

KEY = ("rl", "demo")
FLEET = ObjectRef("RolloutFleet", *KEY)


class Life:
    """A fleet, its passes, and what the kubelet does in between."""

    def __init__(self, runtime, cluster):
        self.runtime, self.cluster = runtime, cluster
        self.events = []

    async def settle(self):
        for _ in range(20):
            before = len(self.cluster.writes)
            result = await run_pass(self.runtime, KEY, self.cluster.observe, 0)
            assert result.error is None
            self.events += [(event.reason, event.warning) for event in result.events]
            if len(self.cluster.writes) == before:
                return
            self.run_new_pods()
        raise AssertionError("still writing")

    def run_new_pods(self):
        broken = {pod["metadata"]["name"]: pod["status"] for pod in self.cluster.of("Pod") if self.is_broken(pod)}
        self.cluster.run_pods()
        for pod in self.cluster.of("Pod"):
            pod["status"] = broken.get(pod["metadata"]["name"], pod["status"])

    def is_broken(self, pod):
        statuses = pod.get("status", {}).get("containerStatuses", [{}])
        return statuses[0].get("restartCount", 0) > 0

    def break_engine(self, engine, restarts, node="node-1"):
        for pod in self.cluster.of("Pod"):
            if pod["metadata"]["labels"].get("rolloutfleet.io/engine") == str(engine):
                ended = {"exitCode": 1, "message": "CUDA error: no device", "finishedAt": "2026-01-02T03:04:00Z"}
                state = {"waiting": {"reason": "CrashLoopBackOff"}}
                pod["spec"]["nodeName"] = node
                pod["status"] = {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "False"}],
                    "containerStatuses": [
                        {"restartCount": restarts, "started": False, "state": state, "lastState": {"terminated": ended}}
                    ],
                }

    @property
    def status(self):
        return self.cluster.objects[FLEET]["status"]

    def condition(self, kind):
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    @property
    def engines(self):
        return sorted(
            pod["metadata"]["name"] for pod in self.cluster.of("Pod") if "-sync-" not in pod["metadata"]["name"]
        )

    @property
    def roster(self):
        return Roster.model_validate_json(
            self.cluster.objects[ObjectRef("ConfigMap", "rl", "demo-members")]["data"]["members.json"]
        )


@pytest.fixture
def life(runtime, cluster):
    return Life(runtime, cluster)


@pytest.mark.row("A-U10")
async def test_an_engine_beyond_its_budget_is_retired_named_and_left_out_until_it_is_revived(life, cluster, make_body):
    body = cluster.put(make_body(replicas=3))
    await life.settle()
    for restarts in (1, 2, 3, 4, 5):
        life.break_engine(1, restarts)
        await life.settle()
    assert life.condition("Ready")["reason"] == "EngineFailing"
    assert len(life.engines) == 3
    life.break_engine(1, 6)
    await life.settle()
    assert life.engines == ["demo-0-0-0", "demo-2-0-0"]
    assert (life.roster.engines, life.roster.retired, [m.engine for m in life.roster.members]) == (2, (1,), [0, 2])
    for kind, status in (("Ready", "False"), ("Stalled", "True"), ("Reconciling", "False")):
        assert life.condition(kind)["status"] == status
    told = life.condition("Stalled")
    assert told["reason"] == "EngineRetired"
    advice = "kubectl annotate rolloutfleet demo --overwrite rolloutfleet.io/revive="
    for words in ("engine 1 is retired", "CUDA error: no device", "recovery.restartBudget", advice, "2 of 3"):
        assert words in told["message"]
    assert life.condition("PlacementSatisfied")["status"] == "True"
    assert life.events.count(("EngineRetired", True)) == 1
    body["metadata"]["annotations"] = {"rolloutfleet.io/revive": "monday"}
    await life.settle()
    assert life.engines == ["demo-0-0-0", "demo-1-0-0", "demo-2-0-0"]
    assert life.condition("Ready")["status"] == "True"
    assert ("EngineRevived", False) in life.events


async def test_an_engine_that_fails_on_one_node_is_moved_off_it_and_new_pods_avoid_it(life, cluster, make_body):
    cluster.put(make_body(replicas=2))
    await life.settle()
    life.break_engine(1, 3, node="bad")
    await life.settle()
    assert life.engines == ["demo-0-0-0", "demo-1-0-1"]
    moved = next(pod for pod in cluster.of("Pod") if pod["metadata"]["name"] == "demo-1-0-1")
    (term,) = moved["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}]}
    assert [node["node"] for node in life.status["recovery"]["quarantinedNodes"]] == ["bad"]
    assert ("NodeQuarantined", True) in life.events
    assert life.condition("Ready")["status"] == "True"


async def test_a_fleet_without_failures_says_nothing_of_recovery(life, cluster, make_body):
    cluster.put(make_body(replicas=1))
    await life.settle()
    assert "recovery" not in life.status
