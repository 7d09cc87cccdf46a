"""Files outside the state folder: paths that containerd, libcni and kubelet fix in their code."""

from pathlib import Path

from localcluster.constants import CNI_NETWORK, NODE_NAMES
from localcluster.paths import Paths

FOLDERS = (
    Path("/run/containerd/s"),
    Path("/run/containerd"),
    Path("/var/lib/cni/results"),
    Path("/var/lib/cni"),
    Path("/var/lib/kubelet/device-plugins"),
    Path("/var/lib/kubelet"),
    Path("/var/log/containers"),
)
"""Folders that may come into being, inner ones first; those that were there before `up` stay."""
_DEVICE_PLUGINS = ("kubelet.sock", "kubelet_internal_checkpoint", "DEPRECATION")


def missing_folders() -> list[str]:
    """Those of FOLDERS that do not exist now: whatever appears there later is ours to take away."""
    return [str(folder) for folder in FOLDERS if not folder.exists()]


def find_strays(paths: Paths, made: list[str]) -> list[Path]:
    """Files of ours outside the state folder. `made` are the folders that did not exist before `up`."""
    found = [file for file in shim_sockets(paths) if file.exists()]
    results = Path("/var/lib/cni/results")
    if results.is_dir():
        # libcni files the loopback interface under a network of its own, named after the same sandbox.
        sandboxes = {file.name.split("-")[1] for file in results.glob(f"{CNI_NETWORK}-*")}
        found += sorted(file for file in results.iterdir() if sandboxes & set(file.name.split("-")))
    links = Path("/var/log/containers")
    if links.is_dir():
        found += sorted(
            p for p in links.iterdir() if p.is_symlink() and str(p.readlink()).startswith(f"{paths.state}/")
        )
    plugins = Path("/var/lib/kubelet/device-plugins")
    if str(plugins) in made:
        found += [plugins / name for name in _DEVICE_PLUGINS if (plugins / name).exists()]
    return found


def shim_sockets(paths: Paths) -> list[Path]:
    """Sockets of our containerd shims, as their bundles name them."""
    sockets = set()
    for name in NODE_NAMES:
        bundles = paths.node(name) / "containerd" / "state" / "io.containerd.runtime.v2.task"
        for address in bundles.glob("*/*/address"):
            sockets.add(Path(address.read_text().strip().removeprefix("unix://")))
    return sorted(sockets)


def remove_strays(paths: Paths, made: list[str]) -> None:
    """Removes our stray files, then the folders in `made` that are empty now."""
    for file in find_strays(paths, made):
        file.unlink(missing_ok=True)
    for folder in FOLDERS:
        if str(folder) in made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
