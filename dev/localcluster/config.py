"""Configuration of every component, rendered from plain values."""

import base64
import copy
import json
from pathlib import Path
from typing import Any

import yaml

from localcluster.constants import (
    BRIDGE,
    CLUSTER_DOMAIN,
    CLUSTER_NAME,
    CNI_NETWORK,
    DNS_HEALTH_PORT,
    DNS_PORT,
    DNS_READY_PORT,
    DNS_SERVICE_ADDRESS,
    ENGINE_MOUNT,
    HOST_ADDRESS,
    KUBELET_PORT,
    LOOPBACK,
    NODE_NAMES,
    PAUSE_IMAGE,
    POD_NETWORK,
    PROXY_HEALTH_PORT,
    PROXY_METRICS_PORT,
)

SYSTEM_USERS = (
    "system:apiserver",
    "system:coredns",
    "system:kube-controller-manager",
    "system:kube-proxy",
    "system:kube-scheduler",
    "system:kwok",
)
SYSTEM_GROUPS = ("system:nodes", "system:serviceaccounts:kube-system")


def to_yaml(document: Any) -> str:
    """YAML with keys in the order in which they were written."""
    return yaml.safe_dump(document, sort_keys=False, width=200)


def render_kubeconfig(server: str, authority: bytes, token: str) -> dict[str, Any]:
    """A kubeconfig of one context; the authority (PEM) travels inside, so the file can be copied anywhere."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": CLUSTER_NAME,
                "cluster": {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()},
            }
        ],
        "users": [{"name": CLUSTER_NAME, "user": {"token": token}}],
        "contexts": [{"name": CLUSTER_NAME, "context": {"cluster": CLUSTER_NAME, "user": CLUSTER_NAME}}],
        "current-context": CLUSTER_NAME,
    }


def render_audit_policy() -> dict[str, Any]:
    """Writes of everyone at Metadata level, less reads, access reviews and the heartbeats of system components."""
    noise = [
        {"group": "", "resources": ["events", "nodes", "nodes/status"]},
        {"group": "events.k8s.io", "resources": ["events"]},
        {"group": "coordination.k8s.io", "resources": ["leases"]},
    ]
    reviews = [{"group": "authentication.k8s.io"}, {"group": "authorization.k8s.io"}]
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": True,
        "rules": [
            {"level": "None", "verbs": ["get", "list", "watch"]},
            {"level": "None", "resources": reviews},
            {"level": "None", "users": list(SYSTEM_USERS), "resources": noise},
            {"level": "None", "userGroups": list(SYSTEM_GROUPS), "resources": noise},
            {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
            {"level": "None"},
        ],
    }


def render_containerd(root: Path, state: Path, socket: Path, node: Path, cni: str, limited: bool) -> str:
    """containerd's config.toml (version 2, read by 1.6 and later).

    `node` holds cni/, runc/ and base-runtime-spec.json; `limited` says that this machine may not lower OOM scores.
    """
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = "{root}"
state = "{state}"
oom_score = 0
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{socket}"

[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = {str(limited).lower()}
  netns_mounts_under_state_dir = true
  stream_server_address = "{LOOPBACK}"

  [{cri}.cni]
    bin_dir = "{cni}"
    conf_dir = "{node / "cni"}"

  [{cri}.containerd]
    snapshotter = "overlayfs"

    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{node / "base-runtime-spec.json"}"

      [{cri}.containerd.runtimes.runc.options]
        Root = "{node / "runc"}"
        SystemdCgroup = false
"""


def render_base_runtime_spec(default: dict[str, Any], engine: Path) -> dict[str, Any]:
    """containerd's own default OCI spec plus one read-only bind mount of the CPU engine environment.

    The default's 1,024 open files are dropped, so that containers get what containerd has.
    """
    spec = copy.deepcopy(default)
    spec["process"].pop("rlimits", None)
    mount = {
        "destination": ENGINE_MOUNT,
        "type": "bind",
        "source": str(engine),
        "options": ["rbind", "ro", "nosuid", "nodev"],
    }
    spec["mounts"] = [*(m for m in spec["mounts"] if m["destination"] != ENGINE_MOUNT), mount]
    return spec


def render_cni(first: str, last: str, pool: Path) -> str:
    """CNI network of one node: our bridge, addresses `first` to `last`, NAT left to our own nft table."""
    plugin = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": False,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(pool),
            "ranges": [[{"subnet": POD_NETWORK, "rangeStart": first, "rangeEnd": last, "gateway": HOST_ADDRESS}]],
            "routes": [{"dst": "0.0.0.0/0", "gw": HOST_ADDRESS}],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": CNI_NETWORK, "plugins": [plugin]}, indent=1)


def render_kubelet(
    node: Path, pki: Path, name: str, socket: Path, address: str, health_port: int, cgroup: str
) -> dict[str, Any]:
    """KubeletConfiguration of one real node, serving on its own address, health on loopback."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "port": KUBELET_PORT,
        "healthzBindAddress": LOOPBACK,
        "healthzPort": health_port,
        "tlsCertFile": str(pki / f"{name}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{name}.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": CLUSTER_DOMAIN,
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "resolvConf": str(node.parent.parent / "config" / "resolv.conf"),
        "containerRuntimeEndpoint": f"unix://{socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "podLogsDir": str(node / "podlogs"),
        "volumePluginDir": str(node / "volume-plugins"),
        "syncFrequency": "2s",
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "10s",
    }


def render_proxy(kubeconfig: Path) -> dict[str, Any]:
    """KubeProxyConfiguration: nftables; one instance serves both nodes, which share the host's network."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "mode": "nftables",
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": NODE_NAMES[0],
        "healthzBindAddress": f"{LOOPBACK}:{PROXY_HEALTH_PORT}",
        "metricsBindAddress": f"{LOOPBACK}:{PROXY_METRICS_PORT}",
        "conntrack": {"maxPerCore": 0},
        "nftables": {"minSyncPeriod": "0s"},
    }


def render_corefile(kubeconfig: Path, upstream: Path, forwards: bool) -> str:
    """CoreDNS: cluster names uncached (a new engine is found at once), all else to the host's own resolvers."""
    forward = f"\n  forward . {upstream}\n  cache 30" if forwards else ""
    return f"""\
{CLUSTER_DOMAIN}:{DNS_PORT} in-addr.arpa:{DNS_PORT} {{
  bind {HOST_ADDRESS}
  errors
  ready {LOOPBACK}:{DNS_READY_PORT}
  health {LOOPBACK}:{DNS_HEALTH_PORT}
  kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
    ttl 1
    fallthrough in-addr.arpa
  }}{forward if forwards else ""}
}}
.:{DNS_PORT} {{
  bind {HOST_ADDRESS}
  errors{forward}
}}
"""


def upstream_resolvers(text: str) -> list[str]:
    """Name servers in the text of a resolv.conf that a pod can use: those on loopback are left out."""
    servers = [
        line.split()[1] for line in text.splitlines() if line.startswith("nameserver ") and len(line.split()) > 1
    ]
    return [server for server in servers if not server.startswith("127.") and server != "::1"]
