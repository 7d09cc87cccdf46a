"""Helm itself, and what it makes of the chart."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster.gobuild import find_program
from localcluster.paths import find_paths

CHART = Path(__file__).parents[2] / "charts" / "rolloutfleet"
NEWEST = "1.35.4"


class Helm:
    """Runs Helm on the chart without a cluster."""

    def __init__(self, program: str, home: Path) -> None:
        self._program = program
        self._environment = {"HOME": str(home), "PATH": os.environ["PATH"]}

    def run(self, *arguments: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        """Helm's own answer; ``CHART`` among the arguments stands for the chart."""
        command = [self._program, *(str(chart) if argument == "CHART" else argument for argument in arguments)]
        return subprocess.run(command, env=self._environment, check=False, capture_output=True, text=True, timeout=60)

    def render(self, *arguments: str, kubernetes: str = NEWEST, chart: Path = CHART) -> list[dict[str, Any]]:
        """The objects that ``helm install`` would create, in Helm's order."""
        answer = self.run(
            *("template", "release", "CHART", "--namespace", "fleet-system", "--kube-version", kubernetes),
            *arguments,
            chart=chart,
        )
        assert answer.returncode == 0, answer.stderr
        return [document for document in yaml.safe_load_all(answer.stdout) if document]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    program = os.environ.get("HELM") or find_program(find_paths(os.environ), "helm", os.environ)
    return Helm(program, tmp_path_factory.mktemp("helm"))
