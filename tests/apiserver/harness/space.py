"""One namespace and its fleets, as tests look at them."""

import json
import secrets
from collections.abc import Callable
from typing import Any

from apiserver.harness.api import SECONDS, Body, Cluster
from apiserver.harness.simulation import IMAGE
from rolloutfleet.contract.names import MEMBERS_KEY
from rolloutfleet_operator import naming

CHILD_KINDS = (
    "ConfigMap",
    "Job",
    "Pod",
    "Role",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
    "WeightSync",
)


def fleet_manifest(namespace: str, name: str, **spec: Any) -> Body:
    """A fleet of one engine on one simulated GPU, with fields of its spec replaced."""
    base = {
        "engine": {"image": IMAGE},
        "model": {"name": "tiny"},
        "template": {"nodeSelector": {"type": "kwok"}},
    }
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.FLEET_KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**base, **spec},
    }


def condition(body: Body, kind: str) -> Body:
    """The condition of one type, empty when there is none."""
    found = (c for c in body.get("status", {}).get("conditions", ()) if c["type"] == kind)
    return next(found, {})


def says(body: Body, kind: str, status: str, reason: str = "") -> bool:
    """Whether a condition of the object's present generation stands so."""
    found = condition(body, kind)
    fresh = found.get("observedGeneration") == body["metadata"]["generation"]
    return fresh and found["status"] == status and reason in ("", found["reason"])


def pod_is_ready(pod: Body) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and condition(pod, "Ready").get("status") == "True"


def roster_of(members: Body) -> Body:
    """The roster in a fleet's ConfigMap."""
    return dict(json.loads(members["data"][MEMBERS_KEY]))


class Fleet:
    """A fleet in the cluster."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.selector = f"{naming.LABEL_FLEET}={name}"
        self.leaders = f"{self.selector},{naming.LABEL_ROLE}={naming.ROLE_LEADER}"

    def body(self) -> Body:
        return self.cluster.get("RolloutFleet", self.namespace, self.name)

    def patch(self, **spec: Any) -> Body:
        return self.cluster.merge("RolloutFleet", self.namespace, self.name, {"spec": spec})

    def delete(self) -> None:
        self.cluster.delete("RolloutFleet", self.namespace, self.name)

    def pods(self, selector: str = "") -> dict[str, Body]:
        found = self.cluster.list("Pod", self.namespace, selector or self.leaders)
        return {pod["metadata"]["name"]: pod for pod in found}

    def roster(self) -> Body:
        return roster_of(self.cluster.get("ConfigMap", self.namespace, naming.members_name(self.name)))

    def child_uids(self) -> dict[str, str]:
        """``Kind/name`` -> UID of everything that belongs to the fleet."""
        return {
            f"{kind}/{item['metadata']['name']}": item["metadata"]["uid"]
            for kind in CHILD_KINDS
            for item in self.cluster.list(kind, self.namespace, self.selector)
        }

    def await_that(self, what: str, true: Callable[[Body], Any], seconds: float = SECONDS) -> Body:
        """The fleet's body as it was when ``true`` held."""
        return self.cluster.wait(
            f"{self.name}: {what}",
            "RolloutFleet",
            self.namespace,
            lambda state: state[self.name] if self.name in state and true(state[self.name]) else None,
            name=self.name,
            seconds=seconds,
        )

    def await_condition(self, kind: str, status: str, reason: str = "", seconds: float = SECONDS) -> Body:
        """The condition, once it stands so for the present generation."""
        body = self.await_that(f"{kind}={status} {reason}", lambda found: says(found, kind, status, reason), seconds)
        return condition(body, kind)

    def await_ready(self, engines: int, seconds: float = SECONDS) -> Body:
        """The body, once Ready and counting that many engines; its pods are then checked to be those."""
        body = self.await_that(
            f"{engines} engines Ready",
            lambda found: says(found, "Ready", "True") and _counts(found) == (engines, engines, engines),
            seconds,
        )
        self.await_pods(lambda pods: len(pods) == engines and all(pod_is_ready(pod) for pod in pods.values()))
        return body

    def await_pods(self, true: Callable[[dict[str, Body]], Any], selector: str = "", seconds: float = SECONDS) -> Any:
        return self.cluster.wait(
            f"{self.name}: pods", "Pod", self.namespace, true, selector=selector or self.leaders, seconds=seconds
        )

    def await_gone(self, seconds: float = 2 * SECONDS) -> None:
        """Returns once neither the fleet nor anything of it is left; the garbage collector learns of new kinds twice a minute."""
        self.cluster.await_gone("RolloutFleet", self.namespace, self.name, seconds=seconds)
        for kind in CHILD_KINDS:
            self.cluster.await_gone(kind, self.namespace, selector=self.selector, seconds=seconds)

    def event_reasons(self) -> set[str]:
        events = self.cluster.list("Event", self.namespace)
        return {event["reason"] for event in events if event["involvedObject"]["name"] == self.name}


def _counts(body: Body) -> tuple[int, int, int]:
    status = body["status"]
    return status["replicas"], status["readyReplicas"], status["updatedReplicas"]


def make_namespace(cluster: Cluster, purpose: str) -> str:
    """The name of a new namespace; it begins with the purpose."""
    name = f"{purpose}-{secrets.token_hex(3)}"
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


class Space:
    """A namespace of one test module."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def make_fleet(self, name: str, **spec: Any) -> Fleet:
        self.cluster.create(fleet_manifest(self.name, name, **spec), fieldValidation="Strict")
        return Fleet(self.cluster, self.name, name)

    def release_lease(self, name: str) -> None:
        """What time would do after a holder died: the next operator need not wait for the Lease to run out."""
        self.cluster.delete("Lease", self.name, name)

    def clear(self) -> None:
        """Takes every fleet and WeightSync away, finalizers and all: there may be no operator to do it."""
        for kind in ("RolloutFleet", "WeightSync"):
            for body in self.cluster.list(kind, self.name):
                name = body["metadata"]["name"]
                self.cluster.merge(kind, self.name, name, {"metadata": {"finalizers": None}})
                self.cluster.delete(kind, self.name, name)
