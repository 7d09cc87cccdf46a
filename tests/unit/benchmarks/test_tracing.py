"""The table of where the time of a refit goes."""

import pytest

pytest.importorskip("torch", reason="the module profiles with torch")

from benchmarks.tracing import Span, bursts, tabulate

from rolloutfleet.contract.trainer import Phase

PHASES = {Phase.PENDING: 0.0, Phase.PAUSING: 2.0, Phase.TRANSFERRING: 8.0, Phase.COMMITTING: 30.0}


def test_neighbouring_kernels_of_one_name_are_one_burst_and_host_work_is_none():
    events = [
        {"cat": "kernel", "name": "copy", "ts": 1_000.0, "dur": 50.0},
        {"cat": "kernel", "name": "copy", "ts": 1_100.0, "dur": 50.0},
        {"cat": "kernel", "name": "copy", "ts": 9_000.0, "dur": 50.0},
        {"cat": "cpu_op", "name": "aten::copy_", "ts": 1_000.0, "dur": 50.0},
    ]
    assert bursts(events, origin=100.0, base=100.0, who="engine") == [
        Span("engine: copy", pytest.approx(1.0), pytest.approx(1.15)),
        Span("engine: copy", pytest.approx(9.0), pytest.approx(9.05)),
    ]


def test_a_gap_is_the_time_in_which_nothing_ran_and_names_the_phases_it_lies_in():
    spans = [Span("engine: copy", 10.0, 18.0), Span("trainer: sums", 12.0, 20.0)]
    rows = tabulate(spans, PHASES, total_ms=33.0)
    assert [(row.what, row.gap_ms) for row in rows] == [
        ("engine: copy", 10.0),
        ("trainer: sums", 0.0),
        ("refit() returns", 13.0),
    ]
    assert [part.partition(":")[0] for part in rows[0].gap_is.split("; ")] == [
        "Pending 2.0 ms",
        "Pausing 6.0 ms",
        "Transferring 2.0 ms",
    ]
    assert rows[1].gap_is == ""


def test_work_outside_the_refit_is_left_out():
    rows = tabulate([Span("before", -5.0, -1.0), Span("after", 40.0, 41.0)], PHASES, total_ms=33.0)
    assert [row.what for row in rows] == ["refit() returns"]
