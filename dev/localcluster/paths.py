"""Where the launcher keeps things: a cache that may always be deleted, and the state of the one cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders of one launcher.

    `cache` holds content-keyed results (binaries, images, environments), `state` the cluster itself,
    `repository` the checkout whose `dev/` folder this package lies in.
    """

    cache: Path
    state: Path
    repository: Path

    @property
    def dev(self) -> Path:
        return self.repository / "dev"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.state / "audit.log"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def etcd(self) -> Path:
        return self.state / "etcd"

    def node(self, name: str) -> Path:
        """Folder of one real node: containerd, kubelet, address pool, pod logs."""
        return self.state / "nodes" / name

    def containerd_socket(self, name: str) -> Path:
        return self.run / f"containerd-{name}.sock"


def find_paths(environment: Mapping[str, str]) -> Paths:
    """Folders as the environment asks for: ROLLOUTFLEET_CLUSTER_DIR, XDG_STATE_HOME, XDG_CACHE_HOME."""
    home = Path(environment["HOME"]) if environment.get("HOME") else Path.home()
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "rolloutfleet"
    chosen = environment.get("ROLLOUTFLEET_CLUSTER_DIR")
    state = (
        Path(chosen)
        if chosen
        else Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state") / "rolloutfleet" / "cluster"
    )
    return Paths(cache=cache.absolute(), state=state.absolute(), repository=Path(__file__).resolve().parents[2])
