"""How much memory of a rank's device a second copy of its weights takes, and how much is free for it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from rolloutfleet.layout import Layout

_ALIGNMENT: Final = 256
"""Bytes at which every parameter of a second buffer begins, so that copies go in their widest form."""

_MARGIN_BYTES: Final = {"cuda": 1 << 30, "cpu": 2 << 30}
"""Left alone: what vLLM and its kernels allocate beside their pools, on a CPU whatever else the machine runs."""

_ROOT: Final = Path("/")

_CGROUP_FILES: Final = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of both generations of control groups: controller, mount, limit, use, and the part of the use that the kernel gives back when pressed."""


def buffer_starts(layout: Layout) -> tuple[dict[str, int], int]:
    """Where each live parameter begins in a second buffer for a layout, in bytes, and how many the buffer has."""
    starts: dict[str, int] = {}
    size = 0
    for parameter in layout.live:
        starts[parameter.name] = size
        size += aligned(parameter.nbytes)
    return starts, size


def aligned(nbytes: int) -> int:
    """Bytes that a parameter takes in a second buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def room_bytes(device: torch.device) -> int:
    """Bytes that may be taken now without pressing whoever else computes on the device; 0 when there are none."""
    free = _free_on_device(device) if device.type == "cuda" else free_in_host_memory()
    return max(free - _MARGIN_BYTES[device.type], 0)


def free_in_host_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may take before the machine has no more, or before the limit of its container or of one around it is met.

    ``root`` is the folder below which ``proc`` and ``sys`` are mounted.
    """
    return min([_available(root), *_left_in_groups(root)])


def _free_on_device(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _available(root: Path) -> int:
    return _numbers((root / "proc/meminfo").read_text().replace(":", " "))["MemAvailable"] * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group of this process that has a limit leaves, from its own outwards."""
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    for controller, mount, limit_file, use_file, spare in _CGROUP_FILES:
        for path in _paths_of(controller, lines):
            # Inside a container the path may be the host's, and only its end, or nothing of it, be found below the mount.
            for folder in (root / mount / path, *(root / mount / path).parents):
                if not folder.is_relative_to(root / mount):
                    break
                if not (folder / limit_file).is_file():
                    continue
                limit = (folder / limit_file).read_text().strip()
                if limit != "max":
                    used = int((folder / use_file).read_text())
                    used -= _numbers((folder / "memory.stat").read_text()).get(spare, 0)
                    yield max(int(limit) - used, 0)


def _paths_of(controller: str, lines: Sequence[str]) -> Iterator[str]:
    """Where ``/proc/self/cgroup`` says that a controller's group is, below its mount."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            yield path.lstrip("/")


def _numbers(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    return {fields[0]: int(fields[1]) for line in text.splitlines() if len(fields := line.split()) > 1}
