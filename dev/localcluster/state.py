"""What one cluster remembers of itself between two runs of the launcher."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from localcluster.cache import write_atomically
from localcluster.errors import LauncherError
from localcluster.paths import Paths


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`kubelets`: there are real nodes. `kwok`: there are fake ones. `made_folders`: absent before the first `up`."""

    kubelets: bool
    kwok: bool
    made_folders: list[str]


def read_state(paths: Paths) -> ClusterState | None:
    """The cluster's own record, or None when there is no cluster."""
    file = paths.state / "cluster.json"
    return ClusterState(**json.loads(file.read_text())) if file.exists() else None


def write_state(paths: Paths, state: ClusterState) -> None:
    write_atomically(paths.state / "cluster.json", json.dumps(asdict(state), indent=1))


def forget_state(paths: Paths) -> None:
    (paths.state / "cluster.json").unlink(missing_ok=True)


@contextmanager
def builder(paths: Paths) -> Iterator[None]:
    """Held by a build of an image or environment: it runs beside `up`, but `down` must not take its mounts away."""
    paths.state.mkdir(parents=True, exist_ok=True)
    with (paths.state / "builds.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def no_builder(paths: Paths) -> Iterator[None]:
    """Raises LauncherError while a build of an image or environment is under way; keeps new ones waiting."""
    with (paths.state / "builds.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LauncherError("`images` or `cpu-env` is at work; wait for it or end it, then `down` again") from error
        yield


@contextmanager
def sole_launcher(paths: Paths) -> Iterator[None]:
    """Lets one launcher at a time change the cluster. Raises LauncherError naming the other one."""
    paths.state.mkdir(parents=True, exist_ok=True)
    with (paths.state / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise LauncherError(f"another launcher (pid {file.read().strip()}) is at work on {paths.state}") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
