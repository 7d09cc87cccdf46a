"""Bridge, addresses, NAT and kernel settings of the cluster: made by `up`, taken back by `down`."""

import json
import os
from pathlib import Path

from localcluster.cache import write_atomically
from localcluster.constants import (
    API_PORT,
    BRIDGE,
    HOST_ADDRESS,
    LOOPBACK,
    NFT_TABLE,
    NODE_NAMES,
    POD_NETWORK,
    SERVICE_NETWORK,
    node_address,
)
from localcluster.errors import LauncherError
from localcluster.packages import find_tool
from localcluster.paths import Paths
from localcluster.progress import run

SYSCTLS_SET = {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"}
SYSCTLS_TOUCHED = (
    *SYSCTLS_SET,
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "net/netfilter/nf_conntrack_max",
    "net/netfilter/nf_conntrack_tcp_be_liberal",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
"""Kernel settings that we, kubelet or kube-proxy change; `down` puts back what was there."""
KUBE_PROXY_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"))
_COMMENT = "rolloutfleet local cluster"


def _tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        raise LauncherError(f"`{name}` is missing on this machine; run `up` as root so that it is installed")
    return found


def render_nft_table() -> str:
    """The nft script of our one table: pods reach the outside, and the host's loopback reaches the API server."""
    return f"""\
table ip {NFT_TABLE} {{
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    ip saddr {POD_NETWORK} ip daddr != {{ {POD_NETWORK}, {SERVICE_NETWORK} }} oifname != "{BRIDGE}" masquerade
  }}
  chain output {{
    type nat hook output priority -110; policy accept;
    ip daddr {LOOPBACK} tcp dport {API_PORT} dnat to {HOST_ADDRESS}:{API_PORT}
  }}
}}
"""


def bridge_exists() -> bool:
    return Path("/sys/class/net", BRIDGE).exists()


def nft_tables(state: Path) -> list[tuple[str, str]]:
    """(family, name) of every nft table; empty without nft, or without root, who alone could have made one."""
    nft = find_tool("nft")
    if nft is None or os.geteuid() != 0:
        return []
    listing = json.loads(run([nft, "-j", "list", "tables"], state=state))["nftables"]
    return [(entry["table"]["family"], entry["table"]["name"]) for entry in listing if "table" in entry]


def require_room(paths: Paths) -> None:
    """Refuses a machine where another Kubernetes node, or another user of our addresses, would be disturbed."""
    foreign = [table for table in nft_tables(paths.state) if table in KUBE_PROXY_TABLES]
    if foreign:
        raise LauncherError("the nft table `ip kube-proxy` exists: another Kubernetes node runs here; end it first")
    if bridge_exists():
        raise LauncherError(
            f"the bridge {BRIDGE} exists, but not for the state folder {paths.state}: "
            "run `down` with the ROLLOUTFLEET_CLUSTER_DIR of the other cluster"
        )
    for route in json.loads(run([_tool("ip"), "-4", "-j", "route"], state=paths.state) or "[]"):
        if str(route["dst"]).startswith(("10.88.", "10.96.")):
            raise LauncherError(f"{route['dst']} is already routed to {route.get('dev')}: the cluster needs that range")


def sysctl_file(paths: Paths) -> Path:
    """Kernel settings as they were; its existence says that this cluster has touched the machine's network."""
    return paths.state / "sysctls.json"


def save_sysctls(paths: Paths) -> None:
    """Remembers kernel settings as they are before the first component changes them; never overwrites."""
    file = sysctl_file(paths)
    if file.exists():
        return
    values = {}
    for name in SYSCTLS_TOUCHED:
        path = Path("/proc/sys", name)
        if path.exists():
            values[name] = path.read_text().strip()
    write_atomically(file, json.dumps(values, indent=1))


def changed_sysctls(paths: Paths) -> dict[str, str]:
    """Kernel settings that differ from what `save_sysctls` remembered -> the remembered value."""
    file = sysctl_file(paths)
    if not file.exists():
        return {}
    saved: dict[str, str] = json.loads(file.read_text())
    now = {name: Path("/proc/sys", name) for name in saved}
    return {
        name: saved[name] for name, path in now.items() if path.exists() and path.read_text().strip() != saved[name]
    }


def restore_sysctls(paths: Paths) -> None:
    """Puts back every kernel setting that changed since `save_sysctls`."""
    for name, value in changed_sysctls(paths).items():
        Path("/proc/sys", name).write_text(value)
    sysctl_file(paths).unlink(missing_ok=True)


def create_network(paths: Paths) -> None:
    """Makes what is missing of bridge, addresses, route, NAT table and kernel settings."""
    state, ip = paths.state, _tool("ip")
    if not Path("/proc/sys/net/bridge").exists():
        run([_tool("modprobe"), "br_netfilter"], state=state)
    for name, value in SYSCTLS_SET.items():
        Path("/proc/sys", name).write_text(value)
    if not bridge_exists():
        run([ip, "link", "add", BRIDGE, "type", "bridge"], state=state)
    addresses = [(HOST_ADDRESS, "16"), *((node_address(i), "32") for i in range(len(NODE_NAMES)))]
    for address, bits in addresses:
        # `replace` is `add` that does not mind finding its work done: a killed `up` is finished by the next one.
        run([ip, "addr", "replace", f"{address}/{bits}", "dev", BRIDGE], state=state)
    run([ip, "link", "set", BRIDGE, "up"], state=state)
    # Gives the host's own packets to Services a source address that pods can answer, even without a default route.
    run([ip, "route", "replace", SERVICE_NETWORK, "dev", BRIDGE, "src", HOST_ADDRESS], state=state)
    if ("ip", NFT_TABLE) not in nft_tables(state):
        run([_tool("nft"), "-f", "-"], state=state, stdin=render_nft_table())
    iptables = find_tool("iptables")
    if iptables and "-P FORWARD DROP" in run([iptables, "-w", "-S", "FORWARD"], state=state):
        existing = forward_rules(state)
        for flag in ("-i", "-o"):
            if not any(f"{flag} {BRIDGE}" in rule for rule in existing):
                run([iptables, "-w", "-I", "FORWARD", *_forward_rule(flag)], state=state)


def _forward_rule(flag: str) -> list[str]:
    return [flag, BRIDGE, "-m", "comment", "--comment", _COMMENT, "-j", "ACCEPT"]


def forward_rules(state: Path) -> list[str]:
    """Our rules in iptables' FORWARD chain (there only where that chain drops by default, as Docker's does)."""
    iptables = find_tool("iptables")
    if iptables is None or os.geteuid() != 0:
        return []
    return [line for line in run([iptables, "-w", "-S", "FORWARD"], state=state).splitlines() if _COMMENT in line]


def bridge_ports() -> list[str]:
    """Interfaces on our bridge: the host's ends of pods."""
    folder = Path("/sys/class/net", BRIDGE, "brif")
    return sorted(port.name for port in folder.iterdir()) if folder.is_dir() else []


def our_tables(paths: Paths) -> list[tuple[str, str]]:
    """(family, name) of the nft tables that are ours; kube-proxy's count only while our own traces say we ran it."""
    tables = nft_tables(paths.state)
    own = ("ip", NFT_TABLE)
    ours = sysctl_file(paths).exists() or bridge_exists() or own in tables
    return [table for table in tables if table == own or (ours and table in KUBE_PROXY_TABLES)]


def remove_network(paths: Paths) -> None:
    """Takes away pods' interfaces, the bridge with its addresses and routes, and every rule of ours."""
    state = paths.state
    for table in our_tables(paths):
        run([_tool("nft"), "delete", "table", *table], state=state)
    if bridge_exists():
        ip = _tool("ip")
        for port in bridge_ports():
            run([ip, "link", "del", port], state=state)
        run([ip, "link", "del", BRIDGE], state=state)
    for flag in ("-i", "-o"):
        if any(f"{flag} {BRIDGE}" in rule for rule in forward_rules(state)):
            run([_tool("iptables"), "-w", "-D", "FORWARD", *_forward_rule(flag)], state=state)
