"""The proof list: its ids, the plugin that checks marks against it, and the report over several tiers."""

import json
import re
from pathlib import Path

import pytest

from proof.ledger import Catalogue, Outcomes, list_unproved, summarize_proof

ROOT = Path(__file__).parents[3]
ID = {"row": re.compile(r"[AB](-[UC])?\d{1,2}"), "scenario": re.compile(r"F\d\d")}

PROJECT_DOCS = {
    "docs/proof/rows.json": json.dumps({"A01": "first", "A02": "second", "B01": "third"}),
    "docs/proof/scenarios.json": json.dumps({"F01": "breaks"}),
    "docs/refused.md": "# Refused\n\n| id | reason |\n|---|---|\n| B01 | not wanted |\n\n## Parts\n\n| A02 | half |\n",
}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name, text in PROJECT_DOCS.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    pytester.makeini("[pytest]\nmarkers =\n  row(id)\n  scenario(id)\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "plugins"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "proof.plugin", "-p", "no:cacheprovider", *arguments)


def test_ids_are_well_formed_and_titled():
    catalogue = Catalogue.load(ROOT / "docs")
    for kind, titles in catalogue.titles.items():
        assert titles
        assert [key for key in titles if not ID[kind].fullmatch(key)] == []
        assert [key for key, title in titles.items() if not title.strip()] == []


def test_every_refusal_has_a_reason():
    refused = Catalogue.load(ROOT / "docs").refused
    assert refused
    assert [key for key, reason in refused.items() if len(reason) < 40] == []


def test_what_only_a_gpu_shows_names_a_program_that_is_there_and_the_file_of_its_results():
    known = {key for titles in Catalogue.load(ROOT / "docs").titles.values() for key in titles}
    entries = re.findall(
        r"^\| (\S+) \| `(\S+)` \| .+ \| `(\S+)` \|$", (ROOT / "docs/proof/gpu.md").read_text(), re.MULTILINE
    )
    assert entries
    for key, program, result in entries:
        assert key in known
        assert (ROOT / program).is_file(), key
        assert result == f"docs/benchmarks/{Path(program).stem}.json", key


def test_a_run_closes_with_what_it_proved(project: pytest.Pytester):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.row("A01")
        @pytest.mark.scenario("F01")
        def test_works(): pass
        """
    )
    result = run(project)
    result.stdout.fnmatch_lines(["rows proved: 1 of 3 (A01); scenarios proved: 1 of 1 (F01)"])


def test_a_failing_skipped_or_xfailing_test_proves_nothing(project: pytest.Pytester):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.row("A01")
        def test_passes(): pass

        @pytest.mark.row("A01")
        def test_fails(): assert False

        @pytest.mark.row("A02")
        @pytest.mark.skip
        def test_skipped(): pass

        @pytest.mark.row("B01")
        @pytest.mark.xfail
        def test_not_yet(): assert False

        @pytest.mark.scenario("F01")
        def test_teardown_fails(broken): pass

        @pytest.fixture
        def broken():
            yield
            raise RuntimeError
        """
    )
    run(project).stdout.fnmatch_lines(["rows proved: 0 of 3; scenarios proved: 0 of 1"])


def test_rows_lists_what_is_open_and_what_is_refused(project: pytest.Pytester):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.row("A01")
        def test_works(): pass
        """
    )
    result = run(project, "--rows")
    result.stdout.fnmatch_lines(
        [
            "rows without a passing test: 1",
            "  A02*second",
            "scenarios without a passing test: 1",
            "  F01*breaks",
            "refused on purpose (docs/refused.md): 1",
            "  B01*not wanted",
        ],
        consecutive=True,
    )


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('row("A99")', "*row 'A99' is not in docs/proof/rows.json*"),
        ('scenario("A01")', "*scenario 'A01' is not in docs/proof/scenarios.json*"),
        ("row", "*write @pytest.mark.row*"),
    ],
)
def test_a_wrong_mark_fails_collection(project: pytest.Pytester, mark: str, message: str):
    project.makepyfile(f"import pytest\n\n@pytest.mark.{mark}\ndef test_works(): pass\n")
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_tiers_are_reported_together(project: pytest.Pytester):
    project.makepyfile('import pytest\n\n@pytest.mark.row("A01")\ndef test_works(): pass\n')
    run(project, "--proof-tier", "unit")
    outcomes = Outcomes.read(project.path / "build" / "proof" / "unit.json")
    other = Outcomes()
    other.record([("row", "A02"), ("row", "A01")], passed=False)
    other.record([("scenario", "F01")], passed=True)
    outcomes.merge(other)
    catalogue = Catalogue.load(project.path / "docs")
    assert summarize_proof(catalogue, outcomes) == "rows proved: 0 of 3; scenarios proved: 1 of 1 (F01)"
    assert "  A01    first" in list_unproved(catalogue, outcomes)


def test_a_refusal_of_an_unknown_id_is_an_error(project: pytest.Pytester):
    (project.path / "docs" / "refused.md").write_text("| Z01 | why |\n")
    with pytest.raises(ValueError, match="refuses Z01"):
        Catalogue.load(project.path / "docs")
