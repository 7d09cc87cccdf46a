"""Takes the cluster down, after any crash, and names whatever is left."""

import shutil
import time
from pathlib import Path

from localcluster import cgroups, mounts, network, processes, strays
from localcluster.components import running, stop_components
from localcluster.constants import BRIDGE, CGROUP, NODE_NAMES
from localcluster.errors import LauncherError
from localcluster.nodes import emptied_mark
from localcluster.packages import find_tool
from localcluster.paths import Paths
from localcluster.progress import run, say
from localcluster.state import forget_state, read_state

RUNTIMES = [f"containerd-{name}" for name in NODE_NAMES]
MANAGERS = ["kwok", "kube-scheduler", "kube-controller-manager", *(f"kubelet-{name}" for name in NODE_NAMES)]
SERVICES = ["coredns", "kube-proxy"]
STORE = ["kube-apiserver", "etcd"]


def take_down(paths: Paths, *, purge: bool) -> None:
    """Ends every process of ours, then removes mounts, cgroups, network and live data.

    Logs, certificates and, after an orderly end, imported images stay for the next `up`; `purge` removes the
    whole state folder. The caller holds the launcher's lock. Raises LauncherError naming what could not be removed.
    """
    state = read_state(paths)
    made = state.made_folders if state else []
    stop_components(paths, MANAGERS, seconds=3.0)
    stop_components(paths, SERVICES, seconds=3.0)
    _kill_pods()
    # Dead containers are taken out of a living containerd, so that its images can be kept; a dead one loses them.
    kept = {name for name in NODE_NAMES if _empty_containerd(paths, name) or emptied_mark(paths, name).exists()}
    for name in kept:
        emptied_mark(paths, name).touch()
    sockets = strays.shim_sockets(paths)
    stop_components(paths, RUNTIMES, seconds=5.0)
    stop_components(paths, STORE, seconds=1.0)
    processes.stop(processes.marked(paths.state), seconds=2.0)
    _kill_pods()
    for socket in sockets:
        socket.unlink(missing_ok=True)
    mounts.unmount_below([paths.state, paths.cache])
    cgroups.remove_cgroups()
    network.remove_network(paths)
    network.restore_sysctls(paths)
    strays.remove_strays(paths, made)
    _remove_live_data(paths, kept)
    left = leftovers(paths, made)
    if left:
        raise LauncherError("could not be removed:\n" + "\n".join(f"  {line}" for line in left))
    forget_state(paths)
    if purge:
        shutil.rmtree(paths.state)


def _kill_pods(seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    # Again until none is left: a process that forks while it is being killed has a child in the same cgroup.
    while inside := cgroups.processes_inside():
        processes.stop(inside, seconds=0.0)
        if time.monotonic() > deadline:
            raise LauncherError(
                f"pids {', '.join(str(i.pid) for i in inside)} of pods do not die; see {CGROUP} cgroups"
            )


def _empty_containerd(paths: Paths, name: str) -> bool:
    """Removes all containers from a living containerd; False when it is dead or does not manage it."""
    ctr = find_tool("ctr")
    if ctr is None or running(paths, f"containerd-{name}") is None:
        return False
    client = [ctr, "--address", str(paths.containerd_socket(name)), "--namespace", "k8s.io"]
    for kind, force in (("tasks", ["--force"]), ("containers", [])):
        deadline = time.monotonic() + 15.0
        while True:
            try:
                listed = run([*client, kind, "ls", "--quiet"], state=paths.state, seconds=15).split()
                if not listed:
                    break
                run([*client, kind, "delete", *force, *listed], state=paths.state, seconds=30)
            except LauncherError as error:
                # containerd itself removes what it sees die: then `delete` misses it, and the next look is shorter.
                if time.monotonic() > deadline:
                    say(f"containerd-{name} could not be emptied, its imported images are dropped: {error}")
                    return False
    return True


def _remove_live_data(paths: Paths, kept: set[str]) -> None:
    for folder in (paths.etcd, paths.run):
        _remove_tree(folder)
    for name in NODE_NAMES:
        node = paths.node(name)
        doomed = [node / part for part in ("kubelet", "addresses", "podlogs", "runc")] + [node / "containerd" / "state"]
        cri = node / "containerd" / "root" / "io.containerd.grpc.v1.cri"
        for folder in (*doomed, cri) if name in kept else (*doomed, node / "containerd"):
            _remove_tree(folder)


def _remove_tree(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def leftovers(paths: Paths, made: list[str] | None = None) -> list[str]:
    """Everything of the cluster that is still on this machine, a line each; empty when it is clean.

    Looks at processes (by marker and by cgroup), mounts, the bridge and its ports, nft tables, iptables rules,
    cgroups, changed kernel settings and files outside the state folder.
    """
    if made is None:
        state = read_state(paths)
        made = state.made_folders if state else []
    pids = {i.pid for i in (*processes.marked(paths.state), *cgroups.processes_inside())}
    found = [f"process {pid}: {processes.command_line(pid)[:100]}" for pid in sorted(pids)]
    found += [f"mount {point}" for point in mounts.mounts_below([paths.state, paths.cache])]
    found += [f"interface {port} on {BRIDGE}" for port in network.bridge_ports()]
    found += [f"bridge {BRIDGE}"] if network.bridge_exists() else []
    found += [f"nft table {family} {name}" for family, name in network.our_tables(paths)]
    found += [f"iptables rule {rule}" for rule in network.forward_rules(paths.state)]
    found += [f"cgroup {folder}" for folder in cgroups.our_cgroups() if folder.name == CGROUP]
    changed = network.changed_sysctls(paths)
    found += [
        f"kernel setting {name.replace('/', '.')} is not {value!r} as before" for name, value in sorted(changed.items())
    ]
    found += [f"file {file}" for file in strays.find_strays(paths, made)]
    return found
