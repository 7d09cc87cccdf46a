"""The file that a benchmark leaves."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch names the machine")

from benchmarks.record import Record, median


def test_a_part_that_fails_is_kept_with_what_was_measured_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc")
    record = Record("thing", tmp_path / "thing.json")
    with record.part("first"):
        record.add(seconds=[1.0])
        record.figure("floor_seconds", 1.0)
    with record.part("second"):
        raise OSError("no such device")
    content = json.loads((tmp_path / "thing.json").read_text())
    assert content["figures"] == {"floor_seconds": 1.0}
    assert content["runs"] == [{"seconds": [1.0]}]
    assert content["failures"] == {"second": "OSError: no such device"}
    assert content["commit"] == "abc"
    assert record.exit_code == 1


def test_a_run_goes_on_from_a_file_and_forgets_a_failure_that_it_mends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc")
    before = Record("thing", tmp_path / "thing.json")
    with before.part("first"):
        before.figure("floor_seconds", 1.0)
        raise OSError("lost")
    after = Record("thing", tmp_path / "thing.json")
    after.resume()
    with after.part("first"):
        after.figure("pause_seconds", 2.0)
    content = json.loads((tmp_path / "thing.json").read_text())
    assert content["figures"] == {"floor_seconds": 1.0, "pause_seconds": 2.0}
    assert "failures" not in content
    assert len(content["commands"]) == 2


def test_figures_of_two_commits_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc")
    Record("thing", tmp_path / "thing.json").write()
    monkeypatch.setenv("BENCHMARK_COMMIT", "def")
    with pytest.raises(ValueError, match="measured on commit abc, this is def"):
        Record("thing", tmp_path / "thing.json").resume()


def test_nothing_measured_has_no_median():
    with pytest.raises(ValueError, match="no values"):
        median([])
