"""Brings the cluster up: what is missing is built and started, what runs is left alone."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace

from localcluster import controlplane, kwok, network, nodes
from localcluster.apiclient import ApiClient, ApiError, node_is_ready
from localcluster.archive import built_archives, import_archives, pause_archive
from localcluster.bootstrap import apply_objects, render_dns, render_kwok_rights
from localcluster.certificates import ensure_pki
from localcluster.components import Component, await_healthy, probe, running, start_missing
from localcluster.constants import NODE_NAMES
from localcluster.cpu_env import link_environment
from localcluster.errors import LauncherError
from localcluster.gobuild import ensure_module
from localcluster.packages import CONTROL_PLANE, NODES, ensure_packages
from localcluster.paths import Paths
from localcluster.ports import require_free
from localcluster.progress import say
from localcluster.state import ClusterState, read_state, write_state
from localcluster.strays import missing_folders

NODES_SECONDS = 60.0


def all_components(paths: Paths, environment: Mapping[str, str], state: ClusterState) -> list[Component]:
    """Every daemon that the cluster has, in the order in which they start."""
    store = controlplane.etcd(paths, environment)
    api = controlplane.api_server(paths, environment, controlplane.api_address(state.kubelets))
    components = [store, api, *controlplane.controllers(paths, environment)]
    if state.kubelets:
        components += nodes.containerds(paths)
        components += nodes.kubelets(paths, environment)
        components += nodes.network_services(paths, environment)
    if state.kwok:
        components.append(kwok.component(paths, environment))
    return components


def is_up(paths: Paths, environment: Mapping[str, str], state: ClusterState) -> bool:
    """True when every daemon runs and is healthy, and every real node is Ready."""
    if any(running(paths, name) is None for name in ("etcd", "kube-apiserver")):
        return False
    components = all_components(paths, environment, state)
    if any(running(paths, component.name) is None or probe(component.health) for component in components):
        return False
    return not state.kubelets or not _unready(ApiClient(paths))


def bring_up(paths: Paths, environment: Mapping[str, str], *, kubelets: bool, with_kwok: bool) -> bool:
    """Starts whatever is missing; True when anything had to be started. The caller holds the launcher's lock.

    Raises LauncherError for a taken port, a foreign Kubernetes node, a failed build, or a component that dies.
    """
    known = read_state(paths)
    if known is not None and kubelets and not known.kubelets:
        raise LauncherError("the cluster was started with --without-kubelets; `down` first, then `up` with real nodes")
    state = known or ClusterState(kubelets=kubelets, kwok=with_kwok, made_folders=missing_folders())
    state = replace(state, kwok=state.kwok or with_kwok)
    if known == state and is_up(paths, environment, state):
        start_missing(paths, all_components(paths, environment, state))
        return False
    begin = time.monotonic()
    ensure_packages(paths, CONTROL_PLANE, *([NODES] if state.kubelets else []))
    for module in (
        "kubernetes",
        "etcd",
        *(["coredns", "pause"] if state.kubelets else []),
        *(["kwok"] if state.kwok else []),
    ):
        ensure_module(paths, module)
    if known is None:
        _clear_remains(paths)
    _prepare(paths, state, fresh=known is None)
    components = all_components(paths, environment, state)
    absent = [component for component in components if running(paths, component.name) is None]
    require_free((c.name, address, port) for c in absent for address, port in c.ports)
    _start(paths, components, state)
    say(f"the cluster is up after {time.monotonic() - begin:.1f} s")
    return True


def _clear_remains(paths: Paths) -> None:
    # An audit log of a former cluster would be counted as this one's writes.
    paths.audit_log.unlink(missing_ok=True)
    for folder in (paths.etcd, paths.run, paths.logs):
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(paths: Paths, state: ClusterState, *, fresh: bool) -> None:
    paths.run.mkdir(parents=True, exist_ok=True)
    if state.kubelets and fresh:
        network.require_room(paths)
    write_state(paths, state)
    ensure_pki(paths)
    controlplane.write_configuration(paths)
    if state.kubelets:
        network.save_sysctls(paths)
        network.create_network(paths)
        nodes.prepare_nodes(paths)
        link_environment(paths)


def _start(paths: Paths, components: list[Component], state: ClusterState) -> None:
    early = [c for c in components if c.name == "etcd" or c.name.startswith("containerd")]
    api = next(c for c in components if c.name == "kube-apiserver")
    late = [c for c in components if c not in early and c is not api]
    start_missing(paths, early)
    await_healthy(paths, early[:1])
    start_missing(paths, [api])
    await_healthy(paths, early)
    if state.kubelets:
        # The sandbox image must be there before the first pod; nodes cannot pull it from anywhere.
        import_archives(paths, [pause_archive(paths)])
    await_healthy(paths, [api])
    start_missing(paths, late)
    client = ApiClient(paths)
    if state.kwok:
        apply_objects(client, render_kwok_rights())
    if state.kubelets:
        apply_objects(client, render_dns())
    await_healthy(paths, late)
    _await_nodes(client, state)
    if state.kubelets:
        import_archives(paths, built_archives(paths))


def _unready(client: ApiClient) -> list[str]:
    ready = {node["metadata"]["name"] for node in client.list_all("/api/v1/nodes") if node_is_ready(node)}
    return [name for name in NODE_NAMES if name not in ready]


def _await_nodes(client: ApiClient, state: ClusterState) -> None:
    deadline = time.monotonic() + NODES_SECONDS
    while True:
        missing = _unready(client) if state.kubelets else []
        if not missing and _has_default_account(client):
            return
        if time.monotonic() > deadline:
            what = f"nodes {', '.join(missing)} are not Ready" if missing else "no default service account"
            raise LauncherError(f"{what} after {NODES_SECONDS:.0f} s; see `logs kubelet-{NODE_NAMES[0]}` and `status`")
        time.sleep(0.1)


def _has_default_account(client: ApiClient) -> bool:
    try:
        client.request("GET", "/api/v1/namespaces/default/serviceaccounts/default")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True
