"""One engine over two real kubelets: vLLM's own multi-node mode, refitted, and started anew as a whole."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.conftest import LiveFleet, manifest

from demo.stage import Stage

PROMPT = "The fleet is"


@pytest.fixture(scope="module")
def wide(stage: Stage) -> Iterator[LiveFleet]:
    """Ready: TP = 2, a rank on each node."""
    body = manifest("wide", replicas=1, parallelism={"tensor": 2, "gpusPerNode": 1})
    stage.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    fleet = LiveFleet(stage, "wide")
    fleet.await_ready()
    yield fleet
    stage.kubectl("delete", "rolloutfleet", "wide", "--timeout=120s")


def restarts(pod: dict[str, Any]) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


@pytest.mark.row("A12", "A21", "B06")
@pytest.mark.scenario("F23")
def test_a_tensor_group_over_two_nodes_gives_transformers_tokens_after_each_refit(wide: LiveFleet):
    (leader,), (follower,) = wide.pods(), wide.pods("follower")
    assert leader["spec"]["nodeName"] != follower["spec"]["nodeName"]
    for seed in (31, 32):
        answer = wide.refit(seed=seed, prompt=[PROMPT])
        assert wide.generate(leader, PROMPT) == (answer["expected"][PROMPT], answer["result"]["version"])
    assert wide.weight_sync()["status"]["members"]["total"] == 1


@pytest.mark.scenario("F72")
def test_a_follower_that_is_killed_costs_one_restart_of_the_whole_engine_and_it_serves_the_next_version(
    wide: LiveFleet,
):
    (leader,), (follower,) = wide.pods(), wide.pods("follower")
    kill = "for p in /proc/[0-9]*; do grep -q VLLM::[W]orker $p/cmdline && kill -9 ${p#/proc/}; done; true"
    wide.stage.kubectl("exec", follower["metadata"]["name"], "--", "sh", "-c", kill)

    def started_anew() -> bool:
        pods = [*wide.pods(), *wide.pods("follower")]
        return all(restarts(pod) == 1 and pod["status"]["containerStatuses"][0].get("started") for pod in pods)

    wide.await_that("both containers are up again", started_anew, 180)
    uids = [pod["metadata"]["uid"] for pod in (leader, follower)]
    assert [pod["metadata"]["uid"] for pod in (*wide.pods(), *wide.pods("follower"))] == uids
    answer = wide.refit(seed=33, prompt=[PROMPT])
    wide.await_ready()
    assert wide.generate(wide.pods()[0], PROMPT) == (answer["expected"][PROMPT], answer["result"]["version"])
    assert [restarts(pod) for pod in (*wide.pods(), *wide.pods("follower"))] == [1, 1]
