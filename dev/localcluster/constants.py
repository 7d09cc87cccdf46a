"""Names, addresses, ports and versions of the local cluster, in one place."""

from typing import Final

CLUSTER_NAME: Final = "rolloutfleet-local"
MARKER: Final = "ROLLOUTFLEET_LAUNCHED_BY"
"""Environment variable that every process started by the launcher carries; its value is the state folder."""

KUBERNETES_VERSION: Final = "1.35.4"
NODE_NAMES: Final = ("real-0", "real-1")

BRIDGE: Final = "rolloutfleet0"
NFT_TABLE: Final = "rolloutfleet"
CGROUP: Final = "rolloutfleet"
CNI_NETWORK: Final = "rolloutfleet"

LOOPBACK: Final = "127.0.0.1"
HOST_ADDRESS: Final = "10.88.0.1"
"""The bridge's own address: where pods find processes of the host."""
POD_NETWORK: Final = "10.88.0.0/16"
SERVICE_NETWORK: Final = "10.96.0.0/16"
API_SERVICE_ADDRESS: Final = "10.96.0.1"
DNS_SERVICE_ADDRESS: Final = "10.96.0.10"
CLUSTER_DOMAIN: Final = "cluster.local"

API_PORT: Final = 6443
ETCD_CLIENT_PORT: Final = 23791
ETCD_PEER_PORT: Final = 23792
CONTROLLER_MANAGER_PORT: Final = 10257
SCHEDULER_PORT: Final = 10259
KUBELET_PORT: Final = 10250
KUBELET_HEALTH_PORT: Final = 10248
"""Health port of the first kubelet; the next ones take 10348, 10448, …"""
PROXY_HEALTH_PORT: Final = 10256
PROXY_METRICS_PORT: Final = 10249
DNS_PORT: Final = 1053
DNS_HEALTH_PORT: Final = 10254
DNS_READY_PORT: Final = 10253
KWOK_PORT: Final = 10247

PAUSE_IMAGE: Final = "localhost/rolloutfleet-pause:dev"
OPERATOR_IMAGE: Final = "localhost/rolloutfleet-operator:dev"
WORKER_IMAGE: Final = "localhost/rolloutfleet-worker:dev"
ENGINE_MOUNT: Final = "/opt/vllm"
"""Where every container finds the CPU build of vLLM."""


def node_address(index: int) -> str:
    """Address on the bridge of real node `index`: its InternalIP."""
    return f"10.88.0.{10 + index}"


def pod_range(index: int) -> tuple[str, str]:
    """First and last pod address of real node `index`."""
    return f"10.88.{index + 1}.1", f"10.88.{index + 1}.254"


def kubelet_health_port(index: int) -> int:
    """Loopback health port of real node `index`."""
    return KUBELET_HEALTH_PORT + 100 * index
