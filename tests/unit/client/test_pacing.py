"""Pieces that arrive beside a serving engine are spaced out by their bytes, and waiting for one's turn can be ended."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.transport import pacing  # noqa: E402
from rolloutfleet.transport.pacing import Pace, serving_rate  # noqa: E402


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PassesAt:
    """A point of a stream that is reached at some time."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self._at = clock, at

    def query(self) -> bool:
        return self._clock.now >= self._at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pacing, "time", made)
    return made


def nothing() -> None:
    """Nobody ends the waiting."""


def test_each_piece_has_the_time_that_its_bytes_take_at_the_bound(clock: Clock) -> None:
    pace = Pace(100.0)
    for _ in range(4):
        pace.await_turn(None, 50, nothing)
    assert clock.now == pytest.approx(102.0, abs=0.01)


def test_time_lost_to_a_slow_wire_is_not_made_up_for_by_a_burst(clock: Clock) -> None:
    pace = Pace(100.0)
    pace.await_turn(PassesAt(clock, 103.0), 50, nothing)
    assert clock.now == pytest.approx(103.0, abs=0.01)
    pace.await_turn(None, 50, nothing)
    assert clock.now == pytest.approx(103.5, abs=0.01)


def test_without_a_bound_nobody_waits_for_a_piece_to_end(clock: Clock) -> None:
    Pace(None).await_turn(PassesAt(clock, 200.0), 1 << 40, nothing)
    assert clock.now == 100.0


def test_what_ends_the_transfer_ends_the_waiting(clock: Clock) -> None:
    def over() -> None:
        if clock.now > 101:
            raise ConnectionAbortedError("told to")

    with pytest.raises(ConnectionAbortedError):
        Pace(1.0).await_turn(None, 1 << 30, over)
    assert clock.now < 102


def test_a_cpu_has_no_bound_and_a_gpu_a_share_of_its_memory_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        memory_clock_rate, memory_bus_width = 3_201_000, 6016

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert serving_rate(torch.device("cpu")) is None
    # An H200 has 4.8 TB/s.
    assert serving_rate(torch.device("cuda", 0)) == pytest.approx(0.05 * 4.8e12 / 4, rel=0.01)


@pytest.mark.parametrize(("clock_rate", "width"), [(0, 6016), (3_201_000, 0)])
def test_a_gpu_that_does_not_tell_its_bandwidth_has_no_bound(
    monkeypatch: pytest.MonkeyPatch, clock_rate: int, width: int
) -> None:
    class Properties:
        memory_clock_rate, memory_bus_width = clock_rate, width

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert serving_rate(torch.device("cuda", 0)) is None


def test_what_comes_out_of_the_hosts_memory_leaves_most_of_the_link_alone() -> None:
    assert serving_rate(torch.device("cuda", 0), from_host=True) == pacing.HOST_BYTES_PER_SECOND
    assert serving_rate(torch.device("cpu"), from_host=True) is None
