"""What users read when an engine cannot start, dies or is replaced, and that the rest goes on serving."""

import json
import threading
from pathlib import Path

import pytest
from tests.cluster.conftest import LiveFleet

PROMPT = "The fleet is"


def ready(pod: dict) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def test_an_unknown_model_path_ends_in_a_condition_that_names_it(make_fleet):
    fleet = make_fleet(
        "no-model", replicas=1, model__source={"hostPath": {"path": "/var/lib/rolloutfleet/models/nowhere"}}
    )
    stuck = fleet.await_that(
        "Ready names the path", lambda: _says(fleet, "Ready", "/var/lib/rolloutfleet/models/nowhere"), 180
    )
    assert stuck["status"] == "False"


def test_an_argument_that_vllm_refuses_ends_in_its_own_words(make_fleet):
    fleet = make_fleet("bad-argument", replicas=1, engine__args={"no-such-argument": "1"})
    stalled = fleet.await_that(
        "Stalled names the argument", lambda: _says(fleet, "Stalled", "--no-such-argument", "True"), 180
    )
    assert stalled["reason"] == "EngineFailing"


def test_more_tensor_parallel_than_any_node_has_ends_in_both_numbers(make_fleet):
    fleet = make_fleet(
        "too-wide",
        replicas=1,
        parallelism__tensor=16,
        placement__gpuResource="nvidia.com/gpu",
        refit__transport="Native",
    )
    placement = fleet.await_that("no node fits", lambda: _says(fleet, "PlacementSatisfied", "16"), 60)
    assert placement["status"] == "False"
    assert placement["reason"] == "NoNodeFits"
    assert "nvidia.com/gpu" in placement["message"]


def test_a_bad_edit_leaves_the_other_engine_serving(make_fleet):
    fleet = make_fleet("bad-edit")
    fleet.await_ready()
    fleet.refit(seed=5)
    patch = json.dumps({"spec": {"engine": {"args": {"enforce-eager": "", "no-such-argument": "1"}}}})
    fleet.stage.kubectl("patch", "rolloutfleet", fleet.name, "--type=merge", "-p", patch)
    fleet.await_that("the new engine fails", lambda: _says(fleet, "Ready", "--no-such-argument"), 180)
    serving = [pod for pod in fleet.pods() if ready(pod)]
    assert len(serving) == 1
    assert fleet.generate(serving[0], PROMPT)[1] == 1


@pytest.mark.scenario("F62")
@pytest.mark.scenario("F63")
@pytest.mark.row("A54")
def test_a_replaced_engine_gets_no_traffic_before_it_holds_the_fleets_version(fleet: LiveFleet):
    version = fleet.refit(seed=51)["result"]["version"]
    gone = fleet.pods()[0]["metadata"]["name"]
    fleet.stage.kubectl("delete", "pod", gone, "--wait=false")
    replaced = fleet.await_that("the replacement is up but stale", lambda: _stale_pod(fleet, gone), 180)
    assert not ready(replaced)
    weights = fleet.condition("WeightsCurrent")
    assert weights["status"] == "False"
    survivor = next(pod for pod in fleet.pods() if ready(pod))
    assert fleet.generate(survivor, PROMPT)[1] == version
    endpoints = json.loads(
        fleet.stage.kubectl("get", "endpointslices", "-l", f"kubernetes.io/service-name={fleet.name}", "-o", "json")
    )
    serving = {
        a for s in endpoints["items"] for e in s["endpoints"] if e["conditions"]["ready"] for a in e["addresses"]
    }
    assert serving == {survivor["status"]["podIP"]}
    after = fleet.refit(seed=52, prompt=[PROMPT])
    fleet.await_ready()
    for pod in fleet.pods():
        assert fleet.generate(pod, PROMPT) == (after["expected"][PROMPT], after["result"]["version"])


@pytest.mark.scenario("F78")
def test_a_node_that_is_drained_in_mid_refit_costs_its_engine_alone(fleet: LiveFleet, tmp_path: Path):
    fleet.refit(seed=55)
    fleet.await_ready()
    drained, survivor = fleet.pods()
    node = drained["spec"]["nodeName"]
    answers: list[dict] = []
    held = {"hold_at": "Transferring", "hold_in": tmp_path, "prompt": [PROMPT]}
    refit = threading.Thread(target=lambda: answers.append(fleet.refit(seed=56, check=False, **held)))
    refit.start()
    fleet.await_that("every engine is prepared", (tmp_path / "held").exists, 60)
    ours = f"rolloutfleet.io/fleet={fleet.name},rolloutfleet.io/engine=0"
    try:
        fleet.stage.kubectl("drain", node, f"--pod-selector={ours}", "--delete-emptydir-data", "--timeout=120s")
        (tmp_path / "go").touch()
        refit.join(120)
    finally:
        fleet.stage.kubectl("uncordon", node)
    assert "result" in answers[0], answers[0]["message"]
    result = answers[0]["result"]
    assert result["members"] == [survivor["metadata"]["name"]]
    assert [lost["podName"] for each in result["attempts"] for lost in each["lost"]] == [drained["metadata"]["name"]]
    assert fleet.generate(survivor, PROMPT) == (answers[0]["expected"][PROMPT], result["version"])
    fleet.await_that("the replacement is up and stale", lambda: _stale_pod(fleet, drained["metadata"]["name"]), 240)
    fleet.refit(seed=57)
    fleet.await_ready()
    assert fleet.pods()[1]["metadata"]["uid"] == survivor["metadata"]["uid"]


@pytest.mark.scenario("F72")
def test_an_engine_whose_core_dies_is_not_ready_and_starts_again(fleet: LiveFleet):
    fleet.refit(seed=60)
    pod = fleet.pods()[1]
    name = pod["metadata"]["name"]
    kill = "for p in /proc/[0-9]*; do grep -q VLLM::[E]ngineCore $p/cmdline && kill -9 ${p#/proc/}; done; true"
    fleet.stage.kubectl("exec", name, "--", "sh", "-c", kill)
    fleet.await_that("the pod is not ready", lambda: not ready(_pod(fleet, name)), 60)
    restarted = fleet.await_that("its container starts again", lambda: _restarted(fleet, name), 120)
    assert (
        "vLLM ended" in restarted["lastState"]["terminated"]["message"]
        or "rank" in restarted["lastState"]["terminated"]["message"]
    )
    fleet.await_that("it is up and stale", lambda: _stale_pod(fleet, ""), 180)
    fleet.refit(seed=61)
    fleet.await_ready()


@pytest.mark.scenario("F75")
def test_an_operator_killed_in_mid_refit_changes_nothing_for_the_refit(fleet: LiveFleet):
    stage = fleet.stage
    pods = [pod["metadata"]["uid"] for pod in fleet.pods()]
    answers: list[dict] = []
    refits = threading.Thread(target=lambda: answers.extend(fleet.refit(seed=seed) for seed in (71, 72, 73)))
    refits.start()
    for _ in range(3):
        selector = ("-n", "rolloutfleet-system", "-l", "app.kubernetes.io/name=rolloutfleet")
        stage.kubectl("delete", "pod", *selector, "--grace-period=0", "--force")
        stage.kubectl("rollout", "status", "deployment", "-n", "rolloutfleet-system", "--timeout=120s")
    refits.join(240)
    versions = [answer["result"]["version"] for answer in answers]
    assert len(versions) == 3
    fleet.await_that(
        "the fleet's status has the last version",
        lambda: fleet.body()["status"].get("weights", {}).get("version") == versions[-1],
    )
    fleet.await_ready()
    assert [pod["metadata"]["uid"] for pod in fleet.pods()] == pods


def _says(fleet: LiveFleet, kind: str, words: str, status: str = "") -> dict:
    found = fleet.condition(kind)
    return found if words in found.get("message", "") and found["status"] in (status or "TrueFalse") else {}


def _pod(fleet: LiveFleet, name: str) -> dict:
    return next(pod for pod in fleet.pods() if pod["metadata"]["name"] == name)


def _restarted(fleet: LiveFleet, name: str) -> dict:
    container = _pod(fleet, name)["status"]["containerStatuses"][0]
    return container if container["restartCount"] > 0 and "running" in container["state"] else {}


def _stale_pod(fleet: LiveFleet, gone: str) -> dict:
    for pod in fleet.pods():
        statuses = pod["status"].get("containerStatuses", [])
        if pod["metadata"]["name"] != gone and statuses and statuses[0].get("started") and not ready(pod):
            return pod
    return {}
