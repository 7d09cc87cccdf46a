"""Commands that documents and CI name exist in the Makefile."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "charts/*/README.md", "Makefile", ".ci/run")
    for path in ROOT.glob(pattern)
)
EXPECTED = {
    *("help", "setup", "lint", "format", "generate", "verify", "lock", "wheels", "images", "clean", "proof"),
    *(
        "test",
        "test-unit",
        "test-contract",
        "test-engines",
        "test-chaos",
        "test-chart",
        "test-apiserver",
        "test-cluster",
    ),
    *("cluster-up", "cluster-down", "demo", "demo-down", "explore"),
    *(
        "bench-chaos",
        "bench-chaos-cluster",
        "bench-fanout",
        "bench-placement",
        "bench-refit_colocated",
        "bench-refit_dense_7b",
        "bench-refit_moe_30b",
    ),
}


def targets() -> dict[str, str]:
    """Documented targets by name with their sentence."""
    return dict(re.findall(r"^([a-z0-9_-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_documented_targets_are_the_expected_ones():
    assert set(targets()) == EXPECTED


def test_help_lists_every_target_with_its_sentence():
    run = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)
    for name, sentence in targets().items():
        assert re.search(rf"^  make {name} +{re.escape(sentence)}$", run.stdout, re.MULTILINE), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_command_in_a_document_exists(document: str):
    text = (ROOT / document).read_text()
    named = {
        *re.findall(r"`make ([a-z0-9_-]+)", text),
        *re.findall(r"^\s*(?:\$ )?make ([a-z0-9_-]+)", text, re.MULTILINE),
    }
    assert named - set(targets()) == set()


def test_the_readme_names_demo_and_test_in_that_order():
    text = (ROOT / "README.md").read_text()
    assert 0 <= text.find("\nmake demo") < text.find("\nmake test")


def test_ci_runs_lint_verify_and_test():
    steps = re.findall(r"^step (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps == ["lint", "verify", "test"]


def test_ci_is_valid_bash():
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True, timeout=30)


def test_hooks_run_the_targets_that_ci_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["entry"] for repository in hooks for hook in repository["hooks"]}
    assert entries <= {f"make {name}" for name in targets()}


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name.endswith(".md")])
def test_relative_links_of_a_document_lead_somewhere(document: str):
    path = ROOT / document
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
