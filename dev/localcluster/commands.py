"""What each subcommand does. Results go to standard output, progress to standard error."""

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from localcluster import kwok
from localcluster.apiclient import ApiClient
from localcluster.bootstrap import apply_objects, render_kwok_rights
from localcluster.cluster import all_components, bring_up
from localcluster.components import await_healthy, log_path, start_missing
from localcluster.cpu_env import ensure_environment
from localcluster.errors import LauncherError
from localcluster.given_cluster import GivenCluster, find_given
from localcluster.gobuild import find_program
from localcluster.images import PROJECT_IMAGES, build_images, forget_bases
from localcluster.paths import Paths
from localcluster.ports import require_free
from localcluster.progress import say
from localcluster.state import ClusterState, builder, no_builder, read_state, sole_launcher, write_state
from localcluster.status import component_rows, node_rows, render_table
from localcluster.teardown import leftovers, take_down


def _own_state(paths: Paths) -> ClusterState:
    state = read_state(paths)
    if state is None:
        raise LauncherError(f"no cluster in {paths.state}; start one with `up`")
    return state


def _given(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> GivenCluster | None:
    return find_given(paths, environment, getattr(arguments, "allow_context", None))


def up(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    given = _given(arguments, paths, environment)
    if given is not None:
        if arguments.kwok_nodes:
            raise LauncherError(f"--kwok-nodes: the given cluster {given.context!r} gets no fake nodes from here")
        say(f"using the given cluster: context {given.context!r}, server {given.server}; nothing was built or started")
        print(given.kubeconfig)
        return 0
    if not arguments.without_kubelets and os.geteuid() != 0:
        raise LauncherError("real nodes need root (network, cgroups, mounts); without root: `up --without-kubelets`")
    with sole_launcher(paths):
        wants_kwok = arguments.kwok_nodes > 0
        started = bring_up(paths, environment, kubelets=not arguments.without_kubelets, with_kwok=wants_kwok)
        if not started:
            say(f"the cluster is up already: {paths.kubeconfig}")
        if wants_kwok:
            _set_fake_nodes(arguments, paths, arguments.kwok_nodes)
    print(paths.kubeconfig)
    return 0


def _set_fake_nodes(arguments: argparse.Namespace, paths: Paths, count: int) -> None:
    labels, taints = kwok.parse_labels(arguments.label), [kwok.parse_taint(text) for text in arguments.taint]
    made, removed = kwok.set_nodes(ApiClient(paths), count, arguments.prefix, labels, arguments.gpus, taints)
    say(f"fake nodes of group {arguments.prefix!r}: {made}" + (f", {removed} removed" if removed else ""))


def kwok_nodes(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    if arguments.count < 0:
        raise LauncherError(f"{arguments.count} fake nodes: the number cannot be negative; 0 removes the group")
    with sole_launcher(paths):
        state = _own_state(paths)
        if not state.kwok:
            state = ClusterState(state.kubelets, True, state.made_folders)
            component = kwok.component(paths, environment)
            require_free((component.name, address, port) for address, port in component.ports)
            apply_objects(ApiClient(paths), render_kwok_rights())
            write_state(paths, state)
            start_missing(paths, [component])
            await_healthy(paths, [component])
        _set_fake_nodes(arguments, paths, arguments.count)
    return 0


def down(arguments: argparse.Namespace, paths: Paths, _environment: Mapping[str, str]) -> int:
    if not paths.state.exists() and not leftovers(paths):
        say("there is no cluster to take down")
        return 0
    with sole_launcher(paths), no_builder(paths):
        take_down(paths, purge=arguments.purge)
    say("the cluster is down, and its state is removed" if arguments.purge else "the cluster is down")
    return 0


def status(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    given = _given(arguments, paths, environment)
    if given is not None:
        print(f"given cluster: context {given.context}, server {given.server} (KUBECONFIG={given.kubeconfig})")
        return 0
    state = read_state(paths)
    if state is None:
        print(f"no cluster in {paths.state}")
        return 1
    rows, well = component_rows(paths, all_components(paths, environment, state))
    print(render_table(rows))
    print()
    print(render_table(node_rows(paths)))
    return 0 if well else 1


def logs(arguments: argparse.Namespace, paths: Paths, _environment: Mapping[str, str]) -> int:
    known = sorted(file.stem for file in paths.logs.glob("*.log"))
    if arguments.component not in known:
        raise LauncherError(
            f"no log of {arguments.component!r}; there are logs of: {', '.join(known) or 'nothing yet'}"
        )
    argv = ["tail", "-n", str(arguments.lines), *(["-F"] if arguments.follow else [])]
    os.execvp("tail", [*argv, str(log_path(paths, arguments.component))])


def images(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    with builder(paths):
        if arguments.refresh:
            forget_bases(paths)
        for archive in build_images(paths, environment, arguments.only or sorted(PROJECT_IMAGES)):
            print(archive.tag, archive.key)
    return 0


def cpu_env(_arguments: argparse.Namespace, paths: Paths, _environment: Mapping[str, str]) -> int:
    with builder(paths):
        print(ensure_environment(paths))
    return 0


def _exports(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        print(f"export {name}={value}")


def tools(_arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    found = {name.upper(): shlex.quote(find_program(paths, name, environment)) for name in ("kubectl", "helm")}
    _exports(found)
    return 0


def env(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    given = _given(arguments, paths, environment)
    folders = dict.fromkeys(str(Path(find_program(paths, name, environment)).parent) for name in ("kubectl", "helm"))
    kubeconfig = given.kubeconfig if given else str(paths.kubeconfig)
    _exports({"KUBECONFIG": shlex.quote(kubeconfig), "PATH": f"{shlex.quote(':'.join(folders))}:$PATH"})
    return 0


def kubeconfig(arguments: argparse.Namespace, paths: Paths, environment: Mapping[str, str]) -> int:
    given = _given(arguments, paths, environment)
    if given is None:
        _own_state(paths)
    print(given.kubeconfig if given else paths.kubeconfig)
    return 0


def audit_log(_arguments: argparse.Namespace, paths: Paths, _environment: Mapping[str, str]) -> int:
    _own_state(paths)
    print(paths.audit_log)
    return 0


def show_leftovers(_arguments: argparse.Namespace, paths: Paths, _environment: Mapping[str, str]) -> int:
    found = leftovers(paths)
    for line in found:
        print(line)
    if not found:
        say("nothing is left")
    return 1 if found else 0
