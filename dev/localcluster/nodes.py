"""Two real nodes on one machine: a containerd and a kubelet each, one kube-proxy, CoreDNS on the host."""

import json
from collections.abc import Mapping
from pathlib import Path

from localcluster.cache import write_atomically
from localcluster.cgroups import create_node_cgroup
from localcluster.components import Component, Health
from localcluster.config import (
    render_base_runtime_spec,
    render_cni,
    render_containerd,
    render_corefile,
    render_kubelet,
    render_proxy,
    to_yaml,
    upstream_resolvers,
)
from localcluster.constants import (
    CGROUP,
    DNS_HEALTH_PORT,
    DNS_PORT,
    DNS_READY_PORT,
    HOST_ADDRESS,
    KUBELET_PORT,
    LOOPBACK,
    NODE_NAMES,
    PROXY_HEALTH_PORT,
    PROXY_METRICS_PORT,
    kubelet_health_port,
    node_address,
    pod_range,
)
from localcluster.gobuild import find_program
from localcluster.packages import cni_folder
from localcluster.paths import Paths
from localcluster.progress import run

CAP_SYS_RESOURCE = 24


def engine_link(paths: Paths) -> Path:
    """What containers get as /opt/vllm: a link to the CPU environment, or to an empty folder before there is one."""
    return paths.state / "vllm"


def emptied_mark(paths: Paths, name: str) -> Path:
    """A file that says: this containerd was ended in order, with images and without containers."""
    return paths.node(name) / "containerd" / "emptied"


def may_lower_oom_score(status: str) -> bool:
    """Whether the text of /proc/self/status grants CAP_SYS_RESOURCE."""
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)


def prepare_nodes(paths: Paths) -> None:
    """Writes the configuration of every node component and makes the nodes' cgroups."""
    (paths.state / "empty").mkdir(exist_ok=True)
    if not engine_link(paths).is_symlink():
        engine_link(paths).symlink_to(paths.state / "empty")
    limited = not may_lower_oom_score(Path("/proc/self/status").read_text())
    default_spec = json.loads(run(["ctr", "oci", "spec"], state=paths.state))
    for index, name in enumerate(NODE_NAMES):
        node = paths.node(name)
        for folder in ("cni", "podlogs", "volume-plugins", "kubelet"):
            (node / folder).mkdir(parents=True, exist_ok=True)
        write_atomically(node / "cni" / "10-bridge.conflist", render_cni(*pod_range(index), node / "addresses"))
        spec = render_base_runtime_spec(default_spec, engine_link(paths))
        write_atomically(node / "base-runtime-spec.json", json.dumps(spec, indent=1))
        socket = paths.containerd_socket(name)
        root, state = node / "containerd" / "root", node / "containerd" / "state"
        containerd = render_containerd(root, state, socket, node, cni_folder(), limited)
        write_atomically(node / "containerd.toml", containerd)
        emptied_mark(paths, name).unlink(missing_ok=True)
        kubelet = render_kubelet(
            node, paths.pki, name, socket, node_address(index), kubelet_health_port(index), f"/{CGROUP}/{name}"
        )
        write_atomically(node / "kubelet.yaml", to_yaml(kubelet))
        create_node_cgroup(name)
    resolvers = _host_resolvers()
    write_atomically(paths.config / "resolv.conf", "".join(f"nameserver {server}\n" for server in resolvers))
    write_atomically(paths.config / "proxy.yaml", to_yaml(render_proxy(paths.config / "proxy.kubeconfig")))
    corefile = render_corefile(paths.config / "coredns.kubeconfig", paths.config / "resolv.conf", bool(resolvers))
    write_atomically(paths.config / "Corefile", corefile)


def _host_resolvers() -> list[str]:
    for file in (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf")):
        if file.exists() and (found := upstream_resolvers(file.read_text())):
            return found
    return []


def containerds(paths: Paths) -> list[Component]:
    """The container runtimes, one a node."""
    return [
        Component(
            f"containerd-{name}",
            ("containerd", "--config", str(paths.node(name) / "containerd.toml")),
            Health(f"unix://{paths.containerd_socket(name)}"),
            config=(paths.node(name) / "containerd.toml", paths.node(name) / "base-runtime-spec.json"),
        )
        for name in NODE_NAMES
    ]


def kubelets(paths: Paths, environment: Mapping[str, str]) -> list[Component]:
    """The kubelets, each on an address of its own on the bridge."""
    return [
        Component(
            f"kubelet-{name}",
            (
                find_program(paths, "kubelet", environment),
                f"--config={paths.node(name) / 'kubelet.yaml'}",
                f"--kubeconfig={paths.config / f'kubelet-{name}.kubeconfig'}",
                f"--root-dir={paths.node(name) / 'kubelet'}",
                f"--hostname-override={name}",
                f"--node-ip={node_address(index)}",
            ),
            Health(f"http://{LOOPBACK}:{kubelet_health_port(index)}/healthz"),
            ((node_address(index), KUBELET_PORT), (LOOPBACK, kubelet_health_port(index))),
            (paths.node(name) / "kubelet.yaml",),
        )
        for index, name in enumerate(NODE_NAMES)
    ]


def network_services(paths: Paths, environment: Mapping[str, str]) -> list[Component]:
    """kube-proxy and CoreDNS, both on the host."""
    proxy, corefile = paths.config / "proxy.yaml", paths.config / "Corefile"
    return [
        Component(
            "kube-proxy",
            (find_program(paths, "kube-proxy", environment), f"--config={proxy}"),
            Health(f"http://{LOOPBACK}:{PROXY_HEALTH_PORT}/livez"),
            ((LOOPBACK, PROXY_HEALTH_PORT), (LOOPBACK, PROXY_METRICS_PORT)),
            (proxy,),
        ),
        Component(
            "coredns",
            (find_program(paths, "coredns", environment), "-conf", str(corefile)),
            Health(f"http://{LOOPBACK}:{DNS_READY_PORT}/ready"),
            ((HOST_ADDRESS, DNS_PORT), (LOOPBACK, DNS_READY_PORT), (LOOPBACK, DNS_HEALTH_PORT)),
            (corefile,),
        ),
    ]
