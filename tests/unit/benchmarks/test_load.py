"""What is made of the arrivals of tokens."""

import struct
from pathlib import Path

import pytest
from benchmarks.load import Arrival, latencies, percentile, read, refusals, tokens_per_second

STEADY = [Arrival(seconds=second / 10, stream=stream, tokens=1) for second in range(100) for stream in range(4)]


def test_tokens_of_all_streams_count_by_the_length_of_the_window():
    assert tokens_per_second(STEADY, 2.0, 4.0) == pytest.approx(40.0)


def test_a_window_without_length_is_refused():
    with pytest.raises(ValueError, match="no length"):
        tokens_per_second(STEADY, 2.0, 2.0)


def test_tokens_that_come_together_count_each():
    assert tokens_per_second([Arrival(1.0, 0, 3), Arrival(1.5, 0, 1)], 1.0, 2.0) == pytest.approx(4.0)


def test_a_gap_is_between_neighbours_of_one_stream_and_counts_where_it_ends():
    arrivals = [Arrival(0.0, 0, 1), Arrival(0.9, 1, 1), Arrival(1.0, 0, 1), Arrival(3.0, 0, 1), Arrival(9.0, 0, 1)]
    assert latencies(arrivals, 1.0, 4.0) == pytest.approx([1.0, 2.0])


def test_a_refusal_is_no_token_and_ends_no_gap():
    arrivals = [Arrival(0.0, 0, 1), Arrival(0.5, 0, 0), Arrival(1.0, 0, 1)]
    assert latencies(arrivals, 0.0, 2.0) == pytest.approx([1.0])
    assert refusals(arrivals, 0.0, 2.0) == 1


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_percentiles_are_values_that_were_measured(percent: float, expected: float):
    assert percentile(range(1, 101), percent) == expected


def test_no_values_have_no_percentile():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_file_whose_last_record_is_cut_gives_the_whole_ones(tmp_path: Path):
    record = struct.pack("<dHH", 1.25, 3, 2)
    (tmp_path / "tokens.bin").write_bytes(record * 2 + record[:5])
    assert read(tmp_path / "tokens.bin") == [Arrival(1.25, 3, 2)] * 2
