"""Orders of work that run beside each other: CUDA streams of one device, or, on a CPU, the plain order of calls."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from rolloutfleet.transport.group import Group

_SHORTEST_POLL: Final = 0.0001
_LONGEST_POLL: Final = 0.002
_POLL_SHARE: Final = 0.01
"""Of the time waited so far: each look takes the interpreter away from an engine that serves in this process."""

Mark: TypeAlias = "torch.cuda.Event | None"
"""A point in a lane; None on a CPU, where it has passed."""


class Lane:
    """One order of work; what is queued in it begins after everything that was queued before."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._first: Mark = None
        self._last: Mark = None
        self._busy = 0.0

    @contextmanager
    def current(self) -> Iterator[None]:
        """Work that the block queues on the current stream is queued in this lane."""
        if self._stream is None:
            began = time.monotonic()
            try:
                yield
            finally:
                self._busy += time.monotonic() - began
            return
        with torch.cuda.stream(self._stream):
            self._first = self._first or self.mark()
            yield
            self._last = self.mark()

    def mark(self) -> Mark:
        """The point that this lane has reached now."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def follow(self, *marks: Mark) -> None:
        """What is queued from now on begins only after those points."""
        for mark in marks:
            if mark is not None and self._stream is not None:
                self._stream.wait_event(mark)

    def follow_caller(self) -> None:
        """What is queued from now on sees what this thread's current stream and the device's default stream hold by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))

    def uses(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a tensor from another lane until this lane is done with it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def take_seconds(self) -> float:
        """Seconds from the first to the last work since the last call (on a CPU: spent on it); the lane must have ended."""
        seconds = self._busy
        if self._first is not None and self._last is not None:
            seconds = self._first.elapsed_time(self._last) / 1000
        self._first, self._last, self._busy = None, None, 0.0
        return seconds


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one of this thread, as kernels and streams that name none want it; does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def await_mark(mark: Mark, group: "Group", deadline: float) -> None:
    """Returns once a point has passed; raises what :func:`raise_if_over` does, so that an abort is seen."""
    began = time.monotonic()
    while mark is not None and not mark.query():
        raise_if_over(group, deadline)
        time.sleep(min(max(_POLL_SHARE * (time.monotonic() - began), _SHORTEST_POLL), _LONGEST_POLL))
    group.raise_if_ended()


def raise_if_over(group: "Group", deadline: float) -> None:
    """Raises TimeoutError at the deadline, or before it what the group's end raises."""
    group.raise_if_ended()
    if time.monotonic() >= deadline:
        raise TimeoutError(
            f"moving weights in epoch {group.epoch} at rank {group.rank} of {group.world_size} did not end in time: "
            "a member has stopped or is too slow"
        )


__all__ = ["Lane", "Mark", "await_mark", "raise_if_over", "working_on"]
