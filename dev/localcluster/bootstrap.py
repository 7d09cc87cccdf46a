"""The few objects that the cluster itself needs: rights of CoreDNS and KWOK, and the DNS Service."""

from typing import Any

from localcluster.apiclient import ApiClient
from localcluster.constants import DNS_PORT, DNS_SERVICE_ADDRESS, HOST_ADDRESS

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_READ = ["get", "list", "watch"]


def _role(name: str, user: str, rules: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
    return [(f"{_RBAC}/clusterroles", role), (f"{_RBAC}/clusterrolebindings", binding)]


def render_kwok_rights() -> list[tuple[str, dict[str, Any]]]:
    """(collection path, manifest) pairs that let KWOK play nodes and their pods."""
    rules = [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": [*_READ, "update", "patch", "delete"]},
        {"apiGroups": [""], "resources": ["nodes/status", "pods/status"], "verbs": ["update", "patch"]},
        {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": ["create", "update", "patch"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "verbs": [*_READ, "create", "update", "patch", "delete"],
        },
    ]
    return _role("system:kwok", "system:kwok", rules)


def render_dns() -> list[tuple[str, dict[str, Any]]]:
    """(collection path, manifest) pairs of CoreDNS: its rights, and a Service without selector that leads to the host."""
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": _READ},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": _READ},
    ]
    protocols = (("dns", "UDP"), ("dns-tcp", "TCP"))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
        "spec": {
            "clusterIP": DNS_SERVICE_ADDRESS,
            "ports": [{"name": n, "port": 53, "protocol": p, "targetPort": DNS_PORT} for n, p in protocols],
        },
    }
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-host",
            "namespace": "kube-system",
            "labels": {
                "kubernetes.io/service-name": "kube-dns",
                "endpointslice.kubernetes.io/managed-by": "localcluster.rolloutfleet.io",
            },
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
        "ports": [{"name": n, "port": DNS_PORT, "protocol": p} for n, p in protocols],
    }
    return [
        *_role("system:coredns", "system:coredns", rules),
        ("/api/v1/namespaces/kube-system/services", service),
        ("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices", slice_),
    ]


def apply_objects(client: ApiClient, objects: list[tuple[str, dict[str, Any]]]) -> None:
    """Server-side apply of (collection path, manifest) pairs, in order."""
    for path, manifest in objects:
        client.apply(path, manifest)
