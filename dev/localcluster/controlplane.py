"""etcd, API server, controller-manager and scheduler."""

from collections.abc import Mapping

from localcluster.cache import write_atomically
from localcluster.certificates import read_tokens
from localcluster.components import Component, Health
from localcluster.config import render_audit_policy, render_kubeconfig, to_yaml
from localcluster.constants import (
    API_PORT,
    CLUSTER_DOMAIN,
    CONTROLLER_MANAGER_PORT,
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    HOST_ADDRESS,
    LOOPBACK,
    SCHEDULER_PORT,
    SERVICE_NETWORK,
)
from localcluster.gobuild import find_program
from localcluster.paths import Paths


def write_configuration(paths: Paths) -> None:
    """Writes the kubeconfigs of the user and of every component, and the audit policy."""
    authority = (paths.pki / "ca.crt").read_bytes()
    server = f"https://{LOOPBACK}:{API_PORT}"
    for short, token in read_tokens(paths).items():
        file = paths.kubeconfig if short == "admin" else paths.config / f"{short}.kubeconfig"
        write_atomically(file, to_yaml(render_kubeconfig(server, authority, token)), 0o600)
    write_atomically(paths.config / "audit-policy.yaml", to_yaml(render_audit_policy()))


def etcd(paths: Paths, environment: Mapping[str, str]) -> Component:
    """The store: on loopback, without fsync, since a machine that crashes takes the cluster with it anyway."""
    client, peer = f"http://{LOOPBACK}:{ETCD_CLIENT_PORT}", f"http://{LOOPBACK}:{ETCD_PEER_PORT}"
    argv = (
        find_program(paths, "etcd", environment),
        f"--data-dir={paths.etcd}",
        "--name=default",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--log-level=warn",
    )
    ports = ((LOOPBACK, ETCD_CLIENT_PORT), (LOOPBACK, ETCD_PEER_PORT))
    return Component("etcd", argv, Health(f"{client}/health"), ports)


def api_server(paths: Paths, environment: Mapping[str, str], address: str) -> Component:
    """The API server, listening on `address` alone: loopback, or the bridge where there are real nodes."""
    pki = paths.pki
    argv = (
        find_program(paths, "kube-apiserver", environment),
        f"--etcd-servers=http://{LOOPBACK}:{ETCD_CLIENT_PORT}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={API_PORT}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--audit-policy-file={paths.config / 'audit-policy.yaml'}",
        f"--audit-log-path={paths.audit_log}",
        # Rotation would lose lines for readers that count writes from an offset.
        "--audit-log-maxsize=10000",
    )
    health = Health(f"https://{address}:{API_PORT}/readyz", pki / "ca.crt", read_tokens(paths)["admin"])
    ports = tuple((entry, API_PORT) for entry in dict.fromkeys((LOOPBACK, address)))
    config = (paths.config / "audit-policy.yaml", pki / "tokens.csv", pki / "apiserver.crt")
    return Component("kube-apiserver", argv, health, ports, config)


def controllers(paths: Paths, environment: Mapping[str, str]) -> list[Component]:
    """Controller-manager and scheduler."""
    pki = paths.pki

    def common(name: str) -> tuple[str, ...]:
        kubeconfig = paths.config / f"{name}.kubeconfig"
        flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return (
            *(f"--{flag}={kubeconfig}" for flag in flags),
            "--leader-elect=false",
            f"--bind-address={LOOPBACK}",
            "--kube-api-qps=500",
            "--kube-api-burst=500",
        )

    manager = (
        find_program(paths, "kube-controller-manager", environment),
        *common("controller-manager"),
        f"--secure-port={CONTROLLER_MANAGER_PORT}",
        f"--service-account-private-key-file={pki / 'sa.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        "--use-service-account-credentials",
        f"--flex-volume-plugin-dir={paths.state / 'volume-plugins'}",
    )
    scheduler = (
        find_program(paths, "kube-scheduler", environment),
        *common("scheduler"),
        f"--secure-port={SCHEDULER_PORT}",
    )
    return [
        Component(
            name, argv, Health(f"https://{LOOPBACK}:{port}/healthz"), ((LOOPBACK, port),), (paths.config / config,)
        )
        for name, argv, port, config in (
            ("kube-controller-manager", manager, CONTROLLER_MANAGER_PORT, "controller-manager.kubeconfig"),
            ("kube-scheduler", scheduler, SCHEDULER_PORT, "scheduler.kubeconfig"),
        )
    ]


def api_address(kubelets: bool) -> str:
    """Where the API server listens: pods must reach it on the bridge, so with real nodes it is there."""
    return HOST_ADDRESS if kubelets else LOOPBACK
