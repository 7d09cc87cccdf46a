"""Mounts below our folders: found in the kernel's table, taken away deepest first."""

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

from localcluster.errors import LauncherError

MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def parse_mount_points(text: str) -> list[str]:
    """Mount points in the order of /proc/self/mountinfo, escapes like `\\040` resolved."""
    points = [line.split()[4] for line in text.splitlines() if line]
    return [re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), point) for point in points]


def mounts_below(folders: Iterable[Path]) -> list[str]:
    """Mount points at or below any of the folders, in the order in which they were mounted."""
    roots = [str(folder) for folder in folders]
    points = parse_mount_points(Path("/proc/self/mountinfo").read_text())
    return [point for point in points if any(point == root or point.startswith(root + "/") for root in roots)]


def unmount_below(folders: Iterable[Path]) -> None:
    """Unmounts everything at or below the folders; a busy mount is detached and goes with its last user.

    Raises LauncherError when a mount stays, so that no caller deletes files through it.
    """
    roots = list(folders)
    for point in reversed(mounts_below(roots)):
        if _libc.umount2(os.fsencode(point), 0) != 0:
            _libc.umount2(os.fsencode(point), MNT_DETACH)
    left = mounts_below(roots)
    if left:
        raise LauncherError(f"cannot unmount {', '.join(left)}; unmount by hand, then run the command again")
