"""The import contracts hold something: a checkout that breaks each of them is refused, contract by contract."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "client/rolloutfleet",
    "operator/rolloutfleet_operator",
    "operator/rolloutfleet_sync",
    "worker_image/rolloutfleet_worker",
)
VIOLATIONS = {
    "The operator's rooms import one way": ("rolloutfleet_operator/plan", "import rolloutfleet_operator.cluster"),
    "The operator's pure rooms know no cluster, no event loop, no clock and no environment": (
        "rolloutfleet_operator/status",
        "import time",
    ),
    "The sync job's protocol is pure: events in, commands out, time passed in": (
        "rolloutfleet_sync/protocol",
        "import asyncio",
    ),
    "Only the cluster room speaks to Kubernetes": ("rolloutfleet_operator/reconcile", "import kubernetes"),
    "Only handlers and the main module know kopf": ("rolloutfleet_operator/reconcile", "import kopf"),
    "The operator and the sync job never load torch, vLLM or Ray": ("rolloutfleet_sync", "import torch"),
    "The wire contract imports nothing of ours but itself, and no transport": ("rolloutfleet/contract", "import httpx"),
    "Layouts and programs are pure: no torch, no network, no clock": ("rolloutfleet/layout", "import time"),
    "The client knows no server": ("rolloutfleet", "import rolloutfleet_sync"),
    "The worker knows neither operator nor sync job": ("rolloutfleet_worker", "import rolloutfleet_operator"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the linter says of each contract, by name, for a copy of the checkout with every violation in it."""
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, statement in VIOLATIONS.values():
        with (copy / folder / "violation.py").open("a") as file:
            file.write(statement + "\n")
    environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}
    linter = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [linter, "--no-cache"], cwd=copy, env=environment, check=False, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1, run.stdout + run.stderr
    verdicts = (line.rsplit(" ", 1) for line in run.stdout.splitlines() if line.endswith((" KEPT", " BROKEN")))
    return {name.strip(): verdict for name, verdict in verdicts}


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_violation_breaks_its_contract(report: dict[str, str], contract: str):
    assert report[contract] == "BROKEN"


def test_every_contract_has_a_violation_that_breaks_it():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {contract["name"] for contract in configuration["tool"]["importlinter"]["contracts"]} == set(VIOLATIONS)
