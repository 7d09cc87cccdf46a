"""A few faults in real processes, judged from outside; ``make bench-chaos`` has the many."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.chaos.network import refused

REPOSITORY = Path(__file__).parents[2]
SKIPPED = 77
FAULTS = (
    "kill,rank,Transferring",
    "kill,launcher,Preparing",
    "kill,sync,Committing",
    "kill,trainer,Transferring",
    "lose,trainer,Preparing",
    "silence,api,Committing",
)
SEED = 11
SECONDS = 400


@pytest.fixture(scope="module", params=["Never", "Auto"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each fault, with weights received in place and staged."""
    if why := refused():
        pytest.skip(f"{why}; run this as root of the machine or of a privileged container")
    output = tmp_path_factory.mktemp("chaos")
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", str(SEED), "--staging", request.param, "-v"]
    command += [word for fault in FAULTS for word in ("--fault", fault)]
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads((output / "chaos.json").read_text())["runs"]
    assert [run["bad"] for run in found] == [[]] * len(FAULTS)
    return dict(zip(FAULTS, found, strict=True))


@pytest.mark.scenario("F60")
@pytest.mark.scenario("F45")
def test_a_worker_killed_in_mid_transfer_leaves_the_others_serving_the_new_version_from_the_same_call(runs):
    run = runs["kill,rank,Transferring"]
    assert run["end"] == "re-formed"
    assert run["tries"] == 1
    assert run["answers"] > 0


def test_an_engine_killed_while_the_transfer_is_prepared_is_left_behind_and_comes_back(runs):
    run = runs["kill,launcher,Preparing"]
    assert run["end"] == "re-formed"
    assert run["seconds_to_whole"] is not None


@pytest.mark.scenario("F66")
def test_a_sync_job_killed_in_the_commit_leaves_nobody_paused_and_no_version_half_published(runs):
    assert runs["kill,sync,Committing"]["seconds_to_whole"] is not None


@pytest.mark.scenario("F04")
def test_the_next_trainer_refits_after_one_that_was_killed_in_mid_transfer(runs):
    assert runs["kill,trainer,Transferring"]["end"] == "next trainer"


@pytest.mark.scenario("F17")
def test_trainers_use_a_store_of_their_own_although_their_environment_is_another_launchers(runs):
    """Every trainer of these runs has torchrun's variables, which name a store that nobody serves."""
    assert all(run["clean_refit_seconds"] is not None for run in runs.values())


def test_a_trainer_whose_machine_falls_silent_costs_no_engine_its_weights(runs):
    assert runs["lose,trainer,Preparing"]["end"] == "next trainer"


def test_a_commit_waits_for_an_api_server_that_does_not_answer(runs):
    assert runs["silence,api,Committing"]["end"] == "completed"
