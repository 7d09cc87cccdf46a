"""Debian packages that real nodes and image builds need."""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from localcluster.errors import LauncherError
from localcluster.paths import Paths
from localcluster.progress import run_long

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")

CONTROL_PLANE = {"openssl": "openssl"}
NODES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "bridge (CNI)": "containernetworking-plugins",
}
IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
ENGINE = {"/usr/bin/python3.11": "python3.11"}


def find_tool(name: str) -> str | None:
    """Path of a program, `sbin` folders included even when PATH lacks them; None when it is missing."""
    if name.endswith("(CNI)"):
        plugin = name.split()[0]
        return next((str(Path(d) / plugin) for d in CNI_FOLDERS if (Path(d) / plugin).exists()), None)
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SEARCH_PATH}")


def cni_folder() -> str:
    """Folder of the CNI plugins. Raises LauncherError when there is none."""
    found = find_tool("bridge (CNI)")
    if found is None:
        raise LauncherError(f"no CNI plugins in {' or '.join(CNI_FOLDERS)}: install containernetworking-plugins")
    return str(Path(found).parent)


def missing_packages(needed: dict[str, str], find: Callable[[str], str | None] = find_tool) -> list[str]:
    """Sorted names of the packages whose programs are not on this machine."""
    return sorted({package for tool, package in needed.items() if find(tool) is None})


def ensure_packages(paths: Paths, *groups: dict[str, str]) -> None:
    """Installs what is missing, as root only.

    Raises LauncherError naming the packages when this user may not install, or the machine has no apt.
    """
    needed: dict[str, str] = {}
    for group in groups:
        needed.update(group)
    missing = missing_packages(needed)
    if not missing:
        return
    command = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0 or find_tool("apt-get") is None:
        raise LauncherError(f"missing on this machine: {', '.join(missing)}; run as root: {command}")
    # A package that starts a service of its own (containerd) must not: the launcher runs its own instances.
    policy = Path("/usr/sbin/policy-rc.d")
    placed = not policy.exists()
    if placed:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        _install(paths, missing)
    finally:
        if placed:
            policy.unlink()
    still = missing_packages(needed)
    if still:
        raise LauncherError(f"installed, but still missing: {', '.join(still)}; look into {paths.logs / 'apt.log'}")


def _install(paths: Paths, packages: Iterable[str]) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run_long(
        "refreshing package lists",
        ["apt-get", "update", "-q"],
        state=paths.state,
        log=paths.logs / "apt-update.log",
        env=env,
    )
    argv = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
    run_long(f"installing {' '.join(packages)}", argv, state=paths.state, log=paths.logs / "apt.log", env=env)
