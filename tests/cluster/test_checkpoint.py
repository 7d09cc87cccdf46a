"""A checkpoint by ``spec.weights.checkpoint`` alone, as a commit to a repository of manifests would bring it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import LiveFleet

from demo.stage import MODEL

PROMPT = "The fleet is"
TOKENS = 12
PROGRAM = """\
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
source, seed, target, prompt, tokens = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
torch.manual_seed(seed)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32).eval()
model.save_pretrained(target, max_shard_size="200KB")
ids = AutoTokenizer.from_pretrained(source)(prompt, return_tensors="pt").input_ids
print(json.dumps(model.generate(ids, max_new_tokens=tokens, do_sample=False)[0][ids.shape[1]:].tolist()))
"""


def save(fleet: LiveFleet, seed: int) -> tuple[Path, list[int]]:
    """A checkpoint of random weights in a folder of every node, and transformers' own tokens of them."""
    folder = MODEL.parent / f"checkpoint-{seed}"
    command = [str(fleet.stage.python), "-c", PROGRAM, str(MODEL), str(seed), str(folder), PROMPT, str(TOKENS)]
    environment = {**fleet.stage.environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder, json.loads(done.stdout.splitlines()[-1])


def patch(fleet: LiveFleet, spec: dict[str, Any]) -> str:
    """Applies a change of the spec; the API server's refusal, empty when there is none."""
    command = [
        "patch",
        "rolloutfleet",
        fleet.name,
        "-n",
        fleet.namespace,
        "--type=merge",
        "-p",
        json.dumps({"spec": spec}),
    ]
    try:
        fleet.stage.kubectl(*command)
    except Exception as refusal:  # noqa: BLE001 - the stage's own error carries the server's words
        return str(refusal)
    return ""


def checkpoint(fleet: LiveFleet, folder: Path, version: int) -> str:
    return patch(fleet, {"weights": {"checkpoint": {"version": version, "hostPath": {"path": str(folder)}}}})


def serves(fleet: LiveFleet, tokens: list[int], version: int) -> bool:
    return all(fleet.generate(pod, PROMPT, TOKENS) == (tokens, version) for pod in fleet.pods())


def started(fleet: LiveFleet) -> list[tuple[str, int]]:
    return [(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in fleet.pods()]


@pytest.mark.scenario("F46")
def test_a_patch_of_the_spec_refits_rolls_back_and_leaves_what_serves_when_it_fails(
    make_fleet: Callable[..., LiveFleet],
):
    fleet = make_fleet("gitops")
    fleet.await_ready()
    before = started(fleet)
    first, first_tokens = save(fleet, 61)
    second, second_tokens = save(fleet, 62)

    def current() -> bool:
        found = fleet.condition("WeightsCurrent")
        return found["status"] == "True" and fleet.body()["status"]["weights"]["version"] == asked

    for asked, folder, tokens in ((1, first, first_tokens), (2, second, second_tokens), (3, first, first_tokens)):
        assert checkpoint(fleet, folder, asked) == ""
        fleet.await_that(f"checkpoint {asked} is served", current, 240)
        assert serves(fleet, tokens, asked)
    assert started(fleet) == before
    told = json.loads(fleet.stage.kubectl("get", "weightsync", "gitops-checkpoint-3", "-o", "json"))
    assert told["status"]["phase"] == "Complete"
    assert told["spec"]["checkpoint"] == {"version": 3, "place": f"hostPath {first}"}

    assert "weights.checkpoint.version 2 is not above 3" in checkpoint(fleet, second, 2)

    shard = next(second.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 64)
    assert checkpoint(fleet, second, 4) == ""
    failed = fleet.await_that("the failure is told", lambda: _failure(fleet), 240)
    assert "the file was cut off" in failed["message"]
    assert fleet.condition("Stalled")["reason"] == "CheckpointFailed"
    assert fleet.condition("Ready")["status"] == "True"
    assert serves(fleet, first_tokens, 3)
    assert started(fleet) == before


def _failure(fleet: LiveFleet) -> dict[str, Any]:
    found = fleet.condition("WeightsCurrent")
    return found if found["reason"] == "CheckpointFailed" else {}
