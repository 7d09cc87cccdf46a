"""Waiting for a point of a stream takes little of the interpreter, and ends soon after the point has passed."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.transport import lanes  # noqa: E402


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds


class Group:
    epoch, rank, world_size = 1, 0, 2

    def raise_if_ended(self) -> None:
        """It goes on."""


class PassesAt:
    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self._at = clock, at

    def query(self) -> bool:
        return self._clock.now >= self._at


@pytest.mark.parametrize(("seconds", "late", "looks"), [(0.005, 0.0002, 60), (0.1, 0.0011, 400), (10.0, 0.0021, 5600)])
def test_the_longer_a_point_takes_the_rarer_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, seconds: float, late: float, looks: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(lanes, "time", clock)
    lanes.await_mark(PassesAt(clock, seconds), Group(), 100.0)
    assert seconds <= clock.now <= seconds + late
    assert clock.sleeps <= looks


def test_a_point_that_does_not_pass_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(lanes, "time", clock)
    with pytest.raises(TimeoutError, match="moving weights in epoch 1 at rank 0 of 2 did not end in time"):
        lanes.await_mark(PassesAt(clock, 100.0), Group(), 1.0)
    assert clock.now < 1.01
