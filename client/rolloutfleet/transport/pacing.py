"""How fast a version may arrive beside an engine that serves.

Decoding waits for memory most of the time, so what a transfer takes of the memory's bandwidth is what it costs. Pieces are spaced out
instead of slowed down: each moves as fast as the wire, with as many of NCCL's channels as a transfer into a paused engine has, then there
is nothing for a while. Fewer channels would hold their multiprocessors for longer, and be missed when the engine waits. A stream of low
priority cannot help: CUDA knows no priority below that of the stream on which an engine decodes, which is the default.
"""

import time
from collections.abc import Callable
from typing import Final

import torch

from rolloutfleet.transport.lanes import Mark

PIECE_BYTES: Final = 256 << 20
"""Largest piece that is moved at once beside an engine that serves: a fraction of a millisecond on a GPU."""

SHARE: Final = 0.05
"""Of a GPU's memory bandwidth, what arrives may take so much."""

TRAFFIC: Final = 4
"""Bytes of memory traffic for a byte that arrives, at most: out of the wire's own buffer, or of the trainer's memory, into its place, and
for the sums."""

HOST_BYTES_PER_SECOND: Final = 16e9
"""What may come out of the host's memory, a third of a PCIe 5 link: the small copies of every step of the model go the same way."""

_POLL_SECONDS: Final = 0.001


class Pace:
    """Spaces out the pieces of one transfer, at most ``bytes_per_second``; with None they follow as fast as they come."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._began = time.monotonic()

    def await_turn(self, before: Mark, nbytes: int, raise_if_over: Callable[[], None]) -> None:
        """Returns when the next piece may begin: the one before, of so many bytes, has ended and had its time.

        ``raise_if_over`` is called meanwhile; what it raises ends the waiting.
        """
        if self._rate is None:
            return
        until = self._began + nbytes / self._rate
        while (left := until - time.monotonic()) > 0 or not (before is None or before.query()):
            raise_if_over()
            time.sleep(max(min(left, 0.05), _POLL_SECONDS))
        self._began = time.monotonic()


def serving_rate(device: torch.device, *, from_host: bool = False) -> float | None:
    """Bytes per second that may arrive on a device whose engine serves; None, which is no bound, for a CPU and for a GPU
    that does not tell how fast its memory is, unless they come out of the host's memory."""
    if device.type != "cuda":
        return None
    if from_host:
        return HOST_BYTES_PER_SECOND
    properties = torch.cuda.get_device_properties(device)
    # Kilohertz at double data rate, and bits.
    bandwidth = 2 * properties.memory_clock_rate * 1000 * properties.memory_bus_width / 8
    return float(SHARE * bandwidth / TRAFFIC) if bandwidth else None


__all__ = ["HOST_BYTES_PER_SECOND", "PIECE_BYTES", "Pace", "serving_rate"]
