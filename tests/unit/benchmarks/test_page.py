"""The table of the page about the data path."""

import pytest
from benchmarks.page import chart, replace_table, write_table

RESULT = {"machine": "1 x GPU", "commit": "0123456789abcdef", "figures": {"floor_seconds": 0.0071842}}
FIGURES = {
    "floor_seconds": 0.007,
    "copy_seconds_digest_off": 0.008,
    "copy_seconds_digest_on": 0.009,
    "refit_seconds_digest_on": 0.03,
    "vllm_reload_seconds": 0.07,
    "vllm_ipc_seconds": 0.11,
}


def test_figures_stand_with_machine_and_commit_and_a_part_that_ended_early_is_named():
    table = write_table({"refit": {**RESULT, "failures": {"pause": "OSError: gone"}}})
    assert "**refit** on 1 x GPU, commit `0123456789ab`" in table
    assert "| floor_seconds | 0.007184 |" in table
    assert "Not measured, for pause ended early: OSError: gone" in table


def test_only_what_lies_between_the_marks_is_replaced():
    page = "before <!-- figures: written by python3 -m benchmarks.page -->\nold\n<!-- end of figures --> after"
    once = replace_table(page, "new\n")
    assert once.startswith("before ")
    assert once.endswith(" after")
    assert "old" not in once
    assert replace_table(once, "new\n") == once


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        replace_table("nothing", "new")


def test_a_chart_is_drawn_only_from_what_was_measured():
    assert chart({**FIGURES, "vllm_ipc_seconds": 0.0}) is None
    drawn = chart(FIGURES)
    assert drawn is not None
    assert "110 ms" in drawn
