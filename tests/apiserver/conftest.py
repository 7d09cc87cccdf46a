"""The product against a real API server, scheduler and controllers; nodes and what runs on them are simulated.

The operator is the real one, in a process of its own. Where a test plays the sync job it says so (``SyncJobStandIn``).
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from apiserver.harness.api import Cluster, RefusedError
from apiserver.harness.crds import install_crds
from apiserver.harness.process import ROOT, OperatorProcess, operator_environment
from apiserver.harness.simulation import NODES, simulated_nodes
from apiserver.harness.space import Space, make_namespace
from apiserver.harness.syncjob import SyncJobStandIn
from localcluster.errors import LauncherError
from localcluster.given_cluster import find_given
from localcluster.gobuild import find_program
from localcluster.paths import find_paths
from localcluster.state import read_state


def launcher(*arguments: str) -> None:
    """Runs the local cluster's command line, its progress shown."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "dev")}
    subprocess.run([sys.executable, "-m", "localcluster", *arguments], check=True, env=environment, timeout=1800)


@pytest.fixture(scope="session")
def kubeconfig(pytestconfig: pytest.Config) -> Iterator[str]:
    """The cluster in KUBECONFIG, unless it looks like production; else a local one without kubelets, gone at the end."""
    paths = find_paths(os.environ)
    try:
        given = find_given(paths, os.environ, None)
    except LauncherError as error:
        pytest.exit(str(error), returncode=2)
    if given is not None:
        yield given.kubeconfig
        return
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    try:
        # Builds may take minutes: their progress is for whoever waits.
        with capture.global_and_fixture_disabled():
            state = read_state(paths)
            if state is not None:
                kind = "a cluster with real nodes" if state.kubelets else "an older cluster"
                print(
                    f"\n{kind} is in {paths.state}, and these tests need its ports: it is taken down", file=sys.stderr
                )
                launcher("down")
            launcher("up", "--without-kubelets")
            find_program(paths, "kwok", os.environ)
        yield str(paths.kubeconfig)
    finally:
        with capture.global_and_fixture_disabled():
            launcher("down")


@pytest.fixture(scope="session")
def admin(kubeconfig: str) -> Iterator[Cluster]:
    """The API server as its administrator sees it."""
    cluster = Cluster(kubeconfig)
    try:
        present = [node["metadata"]["name"] for node in cluster.list("Node")]
    except (httpx.HTTPError, RefusedError) as error:
        pytest.exit(f"the API server of {kubeconfig} does not let itself be used: {error}", returncode=2)
    foreign = [name for name in present if name not in NODES]
    if foreign:
        pytest.exit(
            f"the cluster has nodes of its own ({', '.join(foreign[:3])}): sync pods would run there for real; "
            "give one without nodes in KUBECONFIG, or unset it to have a local one",
            returncode=2,
        )
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def cluster(admin: Cluster) -> Cluster:
    """The API server, serving our kinds."""
    install_crds(admin)
    return admin


@pytest.fixture(scope="session")
def nodes(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Four simulated nodes of eight GPUs."""
    program = find_program(find_paths(os.environ), "kwok", os.environ)
    with simulated_nodes(admin, program, tmp_path_factory.mktemp("kwok")):
        yield NODES


@pytest.fixture(scope="module")
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace of the module's own."""
    purpose = Path(str(request.path)).stem.removeprefix("test_").replace("_", "-")
    made = Space(cluster, make_namespace(cluster, purpose))
    yield made
    made.clear()
    cluster.delete("Namespace", "", made.name)


@pytest.fixture(scope="module")
def operator(space: Space, nodes: tuple[str, ...]) -> Iterator[OperatorProcess]:
    """The operator, serving the module's namespace."""
    process = OperatorProcess(space.cluster.kubeconfig, operator_environment(space.name, lease_namespace=space.name))
    try:
        process.await_lease()
        yield process
    finally:
        if process.alive:
            process.stop()


Launch = Callable[..., OperatorProcess]


@pytest.fixture
def launch(space: Space, nodes: tuple[str, ...]) -> Iterator[Launch]:
    """Starts operators of the test's own; those that still run at its end are killed."""
    started: list[OperatorProcess] = []

    def start(kubeconfig: str = "", **environment: str) -> OperatorProcess:
        told = {**operator_environment(space.name, lease_namespace=space.name), **environment}
        started.append(OperatorProcess(kubeconfig or space.cluster.kubeconfig, told))
        return started[-1]

    yield start
    for process in started:
        if process.alive:
            process.kill()
    space.release_lease("rolloutfleet-operator")


@pytest.fixture
def sync_job(space: Space) -> Iterator[Callable[..., SyncJobStandIn]]:
    """Makes stand-ins for sync jobs."""
    made: list[SyncJobStandIn] = []

    def make(fleet: str, weightsync: str = "") -> SyncJobStandIn:
        made.append(SyncJobStandIn(space.cluster, space.name, fleet, weightsync))
        return made[-1]

    yield make
    for stand_in in made:
        stand_in.close()
