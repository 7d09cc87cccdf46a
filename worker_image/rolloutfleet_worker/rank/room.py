"""How much memory of a rank's device is free for a second copy of its weights."""

from pathlib import Path
from typing import Final

import torch

_MARGIN_BYTES: Final = {"cuda": 1 << 30, "cpu": 2 << 30}
"""Left alone: what vLLM and its kernels allocate beside their pools, on a CPU whatever else the machine runs."""


def room_bytes(device: torch.device) -> int:
    """Bytes that may be taken now without pressing whoever else computes on the device; 0 when there are none."""
    free = _free_on_device(device) if device.type == "cuda" else _available_bytes(Path("/proc/meminfo").read_text())
    return max(free - _MARGIN_BYTES[device.type], 0)


def _free_on_device(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _available_bytes(meminfo: str) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024
