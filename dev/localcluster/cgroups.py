"""The cgroups that our kubelets put pods into: made, searched for processes, and removed, on v1 and v2."""

import os
import time
from pathlib import Path

from localcluster.constants import CGROUP
from localcluster.errors import LauncherError
from localcluster.processes import Identity, identify

_V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids")


def parse_hierarchies(mountinfo: str) -> list[tuple[Path, bool]]:
    """(mount point, is v2) of every mounted cgroup hierarchy in the text of /proc/self/mountinfo."""
    found: dict[Path, bool] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind = right.split()[0] if right else ""
        if kind in ("cgroup", "cgroup2"):
            found[Path(left.split()[4])] = kind == "cgroup2"
    return sorted(found.items())


def hierarchies() -> list[tuple[Path, bool]]:
    """(mount point, is v2) of every cgroup hierarchy of this machine, each once."""
    return parse_hierarchies(Path("/proc/self/mountinfo").read_text())


def create_node_cgroup(name: str) -> None:
    """Makes `/rolloutfleet/NAME` in every hierarchy that a kubelet uses."""
    known = hierarchies()
    hybrid = any(not v2 for _, v2 in known)
    for root, v2 in known:
        if v2 and hybrid:
            continue
        parent = root
        for part in (CGROUP, name):
            if v2:
                _enable_controllers(parent)
            child = parent / part
            child.mkdir(exist_ok=True)
            for inherited in ("cpuset.cpus", "cpuset.mems"):
                # A v1 cpuset is born empty, and no process can enter an empty one.
                if not v2 and (child / inherited).exists():
                    (child / inherited).write_text((parent / inherited).read_text())
            parent = child
        if v2:
            _enable_controllers(parent)


def _enable_controllers(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    wanted = [f"+{name}" for name in _V2_CONTROLLERS if name in available]
    (folder / "cgroup.subtree_control").write_text(" ".join(wanted))


def our_cgroups() -> list[Path]:
    """Every cgroup of ours, children before parents."""
    found: list[Path] = []
    for root, _ in hierarchies():
        # os.walk, unlike rglob, does not mind a cgroup that vanishes under it: shims remove those of ended pods.
        found += [Path(folder) for folder, _, _ in os.walk(root / CGROUP, topdown=False)]
    return found


def processes_inside() -> list[Identity]:
    """Living processes in our cgroups: those of pods."""
    pids: set[int] = set()
    for folder in our_cgroups():
        try:
            pids.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
        except (FileNotFoundError, OSError):
            continue
    return [identity for pid in sorted(pids) if (identity := identify(pid)) is not None]


def remove_cgroups(seconds: float = 5.0) -> None:
    """Removes our cgroups. Raises LauncherError naming one that is still busy after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        busy = ""
        for folder in our_cgroups():
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                busy = f"{folder}: {error.strerror}"
        if not our_cgroups():
            return
        if time.monotonic() > deadline:
            raise LauncherError(f"cgroup still in use: {busy}; look at the processes in its cgroup.procs")
        # Just after a kill the kernel keeps a cgroup busy for a moment, and sends no event when it is not.
        time.sleep(0.05)
