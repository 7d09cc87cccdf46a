"""An operator that looks after a fleet in which nothing changes writes nothing."""

import re
import time
from collections import Counter
from collections.abc import Callable

from apiserver.harness.api import Cluster
from apiserver.harness.process import LEASE, OperatorProcess
from apiserver.harness.space import CHILD_KINDS, Space

WINDOW_SECONDS = 30.0
WRITES = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})
_SAMPLE = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>[0-9.e+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
HEARTBEATS = frozenset({"leases", "nodes", "events", "endpoints", "endpointslices"})
"""Resources that parties of the cluster itself write in their own time; our own events and Lease are looked at one by one."""
ASKED = frozenset({"authorization.k8s.io", "authentication.k8s.io"})
"""Groups whose POST is a question."""


def count_writes(cluster: Cluster) -> Counter[str]:
    """``VERB resource`` -> requests since the API server's start, refused ones too."""
    counts: Counter[str] = Counter()
    for sample in _SAMPLE.finditer(cluster.text("/metrics")):
        labels = dict(_LABEL.findall(sample["labels"]))
        if labels["verb"] in WRITES and labels["resource"] not in HEARTBEATS and labels["group"] not in ASKED:
            name = "/".join(filter(None, (labels["resource"], labels["subresource"])))
            counts[f"{labels['verb']} {name}"] += int(float(sample["count"]))
    return counts


def versions(space: Space) -> dict[str, str]:
    """``Kind/name`` -> resourceVersion of all that there is in the namespace but the Lease."""
    return {
        f"{kind}/{body['metadata']['name']}": body["metadata"]["resourceVersion"]
        for kind in (*CHILD_KINDS, "RolloutFleet", "Event")
        for body in space.cluster.list(kind, space.name)
    }


def test_a_fleet_that_does_not_change_causes_no_write_but_the_leases(
    space: Space, operator: OperatorProcess, sync_job: Callable
):
    fleet = space.make_fleet("quiet", replicas=3)
    fleet.await_ready(3)
    sync_job("quiet").report(epoch=1, version=0, engines=3)
    fleet.await_condition("WeightsCurrent", "True", "Current")
    second = {"fleetRef": {"name": "quiet"}, "trainer": {}}
    metadata = {"name": "second", "namespace": space.name}
    body = {"apiVersion": "rolloutfleet.io/v1alpha1", "kind": "WeightSync", "metadata": metadata, "spec": second}
    space.cluster.create(body)
    space.cluster.wait(
        "the second WeightSync knows its turn",
        "WeightSync",
        space.name,
        lambda state: state["second"].get("status", {}).get("conditions"),
        name="second",
    )
    space.cluster.wait(
        "namespaces of earlier tests are gone",
        "Namespace",
        "",
        lambda state: all("deletionTimestamp" not in body["metadata"] for body in state.values()),
        seconds=60,
    )
    await_calm(space.cluster)
    lease = space.cluster.get("Lease", space.name, LEASE)["spec"]["renewTime"]
    before, stored = count_writes(space.cluster), versions(space)
    time.sleep(WINDOW_SECONDS)  # the window itself: there is no event for nothing happening
    assert count_writes(space.cluster) - before == Counter()
    assert versions(space) == stored
    assert space.cluster.get("Lease", space.name, LEASE)["spec"]["renewTime"] > lease
    assert operator.alive
    fleet.delete()


def await_calm(cluster: Cluster, seconds: float = 20.0) -> None:
    """Returns once a second has passed without a write: endpoint controllers and the like trail behind."""
    deadline = time.monotonic() + seconds
    before = count_writes(cluster)
    while True:
        time.sleep(1.0)  # a counter has no event
        now = count_writes(cluster)
        if now == before:
            return
        assert time.monotonic() < deadline, f"still written after {seconds:g} s: {now - before}"
        before = now
