"""A small synchronous client of the Kubernetes API that waits by watching."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

Body = dict[str, Any]
Found = TypeVar("Found")

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
SECONDS = 30.0

_CLUSTERWIDE = {"Namespace", "Node", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
_PREFIXES = {
    "ClusterRole": ("/apis/rbac.authorization.k8s.io/v1", "clusterroles"),
    "ClusterRoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "CustomResourceDefinition": ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices"),
    "Event": ("/api/v1", "events"),
    "Job": ("/apis/batch/v1", "jobs"),
    "ComputeDomain": ("/apis/resource.nvidia.com/v1beta1", "computedomains"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Namespace": ("/api/v1", "namespaces"),
    "Node": ("/api/v1", "nodes"),
    "Pod": ("/api/v1", "pods"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "PodMonitor": ("/apis/monitoring.coreos.com/v1", "podmonitors"),
    "PrometheusRule": ("/apis/monitoring.coreos.com/v1", "prometheusrules"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "RolloutFleet": ("/apis/rolloutfleet.io/v1alpha1", "rolloutfleets"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "WeightSync": ("/apis/rolloutfleet.io/v1alpha1", "weightsyncs"),
}

BUSY_SECONDS = 30.0
"""How long the server may answer 429, as it does while it takes up a changed CRD; clients wait as long as it asks."""


class RefusedError(Exception):
    """The API server said no; ``causes`` are (field, message) pairs, sorted."""

    def __init__(self, code: int, answer: Mapping[str, Any]) -> None:
        self.code = code
        self.message = str(answer.get("message", ""))
        found = (answer.get("details") or {}).get("causes") or ()
        self.causes = sorted((str(cause.get("field", "")), str(cause.get("message", ""))) for cause in found)
        super().__init__(f"HTTP {code}: {self.message}")


def path_of(kind: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The path of a collection, an object or a subresource."""
    prefix, plural = _PREFIXES[kind]
    inside = f"/namespaces/{namespace}" if namespace and kind not in _CLUSTERWIDE else ""
    return f"{prefix}{inside}/{plural}" + "".join(f"/{part}" for part in (name, subresource) if part)


class Cluster:
    """The API server as one user sees it."""

    def __init__(self, kubeconfig: str, token: str = "") -> None:
        self.kubeconfig = kubeconfig
        configuration = Configuration()
        load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        verify: Any = configuration.ssl_ca_cert or True if configuration.verify_ssl else False
        certificate = (configuration.cert_file, configuration.key_file) if configuration.cert_file else None
        own = f"Bearer {token}" if token else configuration.get_api_key_with_prefix("BearerToken")
        headers = {"Authorization": own} if own else {}
        self._server = configuration.host
        self._trust = {"certificate-authority": configuration.ssl_ca_cert} if configuration.ssl_ca_cert else {}
        if not configuration.verify_ssl:
            self._trust = {"insecure-skip-tls-verify": True}
        self._http = httpx.Client(
            base_url=self._server,
            headers=headers,
            verify=verify,
            cert=None if token else certificate,
            timeout=SECONDS,
            trust_env=False,
        )

    def as_user(self, token: str) -> "Cluster":
        """The same server with somebody else's bearer token."""
        return Cluster(self.kubeconfig, token)

    def write_kubeconfig(self, file: Path, token: str) -> str:
        """The path of a kubeconfig for this server and somebody else's bearer token."""
        entries = {
            "clusters": {"cluster": {"server": self._server, **self._trust}},
            "users": {"user": {"token": token}},
            "contexts": {"context": {"cluster": "tier", "user": "tier"}},
        }
        document = {section: [{"name": "tier", **entry}] for section, entry in entries.items()}
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "tier", **document}))
        return str(file)

    def close(self) -> None:
        self._http.close()

    def text(self, path: str) -> str:
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.text

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        **query: str,
    ) -> Body:
        """The decoded answer; raises RefusedError."""
        headers = {"Content-Type": content_type, "Accept": accept}
        content = None if body is None else json.dumps(body)
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            answer = self._http.request(method, path, params=query, content=content, headers=headers)
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS or time.monotonic() > deadline:
                break
            time.sleep(float(answer.headers.get("Retry-After", 1)))
        decoded = answer.json() if answer.content else {}
        if answer.status_code >= 300:
            raise RefusedError(answer.status_code, decoded)
        return dict(decoded)

    def get(self, kind: str, namespace: str, name: str, subresource: str = "") -> Body:
        return self.call("GET", path_of(kind, namespace, name, subresource))

    def find(self, kind: str, namespace: str, name: str) -> Body | None:
        """The object, None when there is none."""
        try:
            return self.get(kind, namespace, name)
        except RefusedError as refusal:
            if refusal.code != 404:
                raise
            return None

    def list(self, kind: str, namespace: str = "", selector: str = "") -> list[Body]:
        query = {"labelSelector": selector} if selector else {}
        return list(self.call("GET", path_of(kind, namespace), **query)["items"])

    def create(self, manifest: Mapping[str, Any], **query: str) -> Body:
        namespace = manifest["metadata"].get("namespace", "")
        return self.call("POST", path_of(manifest["kind"], namespace), manifest, **query)

    def apply(self, manifest: Mapping[str, Any], manager: str, subresource: str = "") -> Body:
        """Server-side apply that takes over what others own."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata.get("namespace", ""), metadata["name"], subresource)
        return self.call("PATCH", path, manifest, APPLY, fieldManager=manager, force="true")

    def merge(self, kind: str, namespace: str, name: str, patch: Any, subresource: str = "", **query: str) -> Body:
        return self.call("PATCH", path_of(kind, namespace, name, subresource), patch, MERGE, **query)

    def delete(self, kind: str, namespace: str, name: str, **options: Any) -> None:
        """Deletes with background propagation unless told otherwise; one that is gone is no error."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background", **options}
        try:
            self.call("DELETE", path_of(kind, namespace, name), body)
        except RefusedError as refusal:
            if refusal.code != 404:
                raise

    def token_of(self, namespace: str, account: str) -> str:
        """A bearer token of a service account."""
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        path = path_of("ServiceAccount", namespace, account, "token")
        return str(self.call("POST", path, request)["status"]["token"])

    def states(
        self, kind: str, namespace: str, selector: str = "", name: str = "", seconds: float = SECONDS
    ) -> Iterator[dict[str, Body]]:
        """Name -> object, first as listed and then after every event, until the time is over."""
        deadline = time.monotonic() + seconds
        path = path_of(kind, namespace)
        query = {"labelSelector": selector} if selector else {}
        query |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        while True:
            listed = self.call("GET", path, **query)
            state = {item["metadata"]["name"]: item for item in listed["items"]}
            yield dict(state)
            version = listed["metadata"]["resourceVersion"]
            for event in self._events(path, query | {"watch": "true", "resourceVersion": version}, deadline):
                if event["type"] == "ERROR":
                    break
                item = event["object"]
                state.pop(item["metadata"]["name"], None)
                if event["type"] != "DELETED":
                    state[item["metadata"]["name"]] = item
                yield dict(state)
            if time.monotonic() >= deadline:
                return

    def _events(self, path: str, query: Mapping[str, str], deadline: float) -> Iterator[Body]:
        """Watch events; ends quietly at the deadline, which bounds each silence too."""
        left = deadline - time.monotonic()
        if left <= 0:
            return
        timeout = httpx.Timeout(SECONDS, read=left)
        try:
            with self._http.stream("GET", path, params=query, timeout=timeout) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    yield json.loads(line)
                    if time.monotonic() >= deadline:
                        return
        except httpx.ReadTimeout:
            return

    def wait(
        self,
        what: str,
        kind: str,
        namespace: str,
        true: Callable[[dict[str, Body]], Found],
        *,
        selector: str = "",
        name: str = "",
        seconds: float = SECONDS,
    ) -> Found:
        """What ``true`` makes of the first state for which it is truthy; fails with the last state otherwise."""
        last: dict[str, Body] = {}
        for last in self.states(kind, namespace, selector, name, seconds):
            found = true(last)
            if found:
                return found
        shown = json.dumps({key: _brief(value) for key, value in last.items()}, indent=1)
        raise AssertionError(f"{what}: not within {seconds:g} s; {kind} in {namespace or 'the cluster'}: {shown}")

    def await_gone(self, kind: str, namespace: str, name: str = "", *, selector: str = "", seconds: float = SECONDS):
        self.wait(
            "nothing left", kind, namespace, lambda state: not state, selector=selector, name=name, seconds=seconds
        )


def _brief(body: Body) -> Body:
    metadata = {
        k: v for k, v in body["metadata"].items() if k in ("deletionTimestamp", "finalizers", "generation", "uid")
    }
    return {"metadata": metadata, "status": body.get("status", {})}
