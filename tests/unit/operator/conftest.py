"""Builders for the operator's tests, and a cluster that lives in memory."""

import copy
import itertools
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.config import Config, Images
from rolloutfleet_operator.errors import AlreadyExistsError, ConflictError, NotFoundError, OperatorError
from rolloutfleet_operator.plan.observe import observe_child, observe_job, observe_pod, observe_weightsync
from rolloutfleet_operator.plan.observed import ContainerState, Observed, Pod
from rolloutfleet_operator.reconcile.runtime import Runtime
from rolloutfleet_operator.reconcile.ticks import Ticks
from rolloutfleet_operator.reconcile.wakes import Wakes
from rolloutfleet_operator.render.identity import FleetIdentity

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def now():
    return NOW


@pytest.fixture
def images():
    return Images(worker="worker:1", operator="operator:1")


@pytest.fixture
def identity():
    return FleetIdentity(name="demo", namespace="rl", uid="fleet-uid")


@pytest.fixture
def make_spec():
    def make(**fields: Any) -> RolloutFleetSpec:
        return RolloutFleetSpec.model_validate({"model": {"name": "org/tiny"}} | fields)

    return make


@pytest.fixture
def make_pod():
    def make(engine: int = 0, incarnation: int = 0, *, container: dict[str, Any] | None = None, **fields: Any) -> Pod:
        name = f"demo-{engine}-0-{incarnation}"
        given = {
            "name": name,
            "uid": f"uid-{name}",
            "owner_uid": "fleet-uid",
            "role": "leader",
            "phase": "Running",
            "created": NOW - timedelta(hours=1),
            "engine": engine,
            "incarnation": incarnation,
            "revision": "new",
            "node": "node-1",
            "address": f"10.0.0.{engine + 1}",
        } | fields
        if container is not None:
            given["container"] = ContainerState(**container)
        return Pod(**given)

    return make


@pytest.fixture
def make_body():
    def make(**spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "rolloutfleet.io/v1alpha1",
            "kind": "RolloutFleet",
            "metadata": {"name": "demo", "namespace": "rl", "uid": "fleet-uid", "generation": 1},
            "spec": {"model": {"name": "org/tiny"}, "placement": {"gpuResource": ""}} | spec,
        }

    return make


@pytest.fixture
def golden():
    """Compares a document with a file of ``golden/``; with UPDATE_GOLDEN=1 in the environment it writes the file instead."""

    def compare(name: str, document: Any) -> None:
        text = yaml.safe_dump(document, sort_keys=True, width=120)
        path = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text()

    return compare


class MemoryCluster:
    """What the gateway offers, over a dictionary: creates, applies, deletes with UID, and counts what was written."""

    def __init__(self) -> None:
        self.objects: dict[ObjectRef, dict[str, Any]] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.refuse: dict[tuple[str, str], OperatorError] = {}
        """(verb, kind) -> error to raise."""
        self._applied: dict[tuple[ObjectRef, str], set[str]] = {}
        """Fields that the last apply held: those that the next one leaves out go."""
        self._uids = itertools.count(1)

    def put(self, body: dict[str, Any]) -> dict[str, Any]:
        stored = copy.deepcopy(body)
        stored["metadata"].setdefault("uid", f"uid-{next(self._uids)}")
        stored["metadata"].setdefault("creationTimestamp", "2026-01-02T03:00:00Z")
        stored["metadata"].setdefault("generation", 1)
        if "stringData" in stored:
            stored["data"] = stored.pop("stringData")
        self.objects[ObjectRef.of(stored)] = stored
        return stored

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [body for ref, body in sorted(self.objects.items(), key=lambda item: item[0].name) if ref.kind == kind]

    def observe(self) -> Observed:
        kinds = ("ConfigMap", "Role", "RoleBinding", "Service", "ServiceAccount")
        return Observed(
            pods=tuple(observe_pod(body) for body in self.of("Pod")),
            jobs=tuple(observe_job(body) for body in self.of("Job")),
            weightsyncs=tuple(observe_weightsync(body) for body in self.of("WeightSync")),
            children=tuple(observe_child(kind, body) for kind in kinds for body in self.of(kind)),
            nodes=None,
        )

    async def get(self, ref: ObjectRef) -> dict[str, Any]:
        self._check("get", ref)
        if ref not in self.objects:
            raise NotFoundError(f"{ref} not found")
        return copy.deepcopy(self.objects[ref])

    async def create(self, manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        ref = ObjectRef.of(manifest)
        self._check("dry-run" if dry_run else "create", ref)
        if ref in self.objects:
            raise AlreadyExistsError(f"{ref} exists")
        if dry_run:
            return manifest
        self.writes.append(("create", ref.kind, ref.name))
        return self.put(manifest)

    async def apply(self, manifest: dict[str, Any], *, force: bool, subresource: str = "") -> dict[str, Any]:
        ref = ObjectRef.of(manifest)
        self._check(f"apply {subresource}".strip(), ref)
        if subresource and ref not in self.objects:
            raise NotFoundError(f"{ref} not found")
        self.writes.append((f"apply {subresource}".strip(), ref.kind, ref.name))
        if ref not in self.objects:
            return self.put(manifest)
        stored = self.objects[ref]
        for key, value in copy.deepcopy(manifest).items():
            if key == "metadata":
                stored["metadata"] |= value
            elif key in ("spec", "status"):
                before = self._applied.get((ref, key), set())
                self._applied[ref, key] = set(value)
                kept = {field: held for field, held in stored.get(key, {}).items() if field not in before - set(value)}
                stored[key] = {**kept, **value}
            else:
                stored[key] = value
        return stored

    async def delete(self, ref: ObjectRef, uid: str) -> None:
        self._check("delete", ref)
        if ref not in self.objects:
            raise NotFoundError(f"{ref} not found")
        if self.objects[ref]["metadata"]["uid"] != uid:
            raise ConflictError(f"{ref} has another UID")
        self.writes.append(("delete", ref.kind, ref.name))
        del self.objects[ref]

    def _check(self, verb: str, ref: ObjectRef) -> None:
        error = self.refuse.get((verb, ref.kind))
        if error is not None:
            raise error

    def run_pods(self, *, ready: bool = True) -> None:
        """What a kubelet and the Job controller do: every pod runs, and a Job has a pod."""
        for job in self.of("Job"):
            ref = ObjectRef("Pod", "rl", f"{job['metadata']['name']}-x")
            if ref not in self.objects:
                owner = {
                    "kind": "Job",
                    "name": job["metadata"]["name"],
                    "uid": job["metadata"]["uid"],
                    "controller": True,
                }
                template = job["spec"]["template"]
                metadata = {"name": ref.name, "namespace": "rl", "labels": template["metadata"]["labels"]}
                self.put(
                    {"kind": "Pod", "metadata": metadata | {"ownerReferences": [owner]}, "spec": dict(template["spec"])}
                )
        for number, pod in enumerate(self.of("Pod")):
            pod["spec"]["nodeName"] = "node-1"
            pod["status"] = {
                "phase": "Running",
                "podIP": f"10.0.0.{number + 1}",
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                "containerStatuses": [{"name": "c", "started": True, "restartCount": 0, "state": {"running": {}}}],
            }


@pytest.fixture
def cluster():
    return MemoryCluster()


@pytest.fixture
def runtime(cluster, images):
    config = Config(
        images=images,
        namespaces=(),
        lease_name="lease",
        lease_namespace="rl",
        identity="me",
        settle_seconds=0.0,
        resync_seconds=300,
    )
    clock = itertools.count()
    return Runtime(
        config=config,
        gateway=cluster,
        wakes=Wakes(),
        ticks=Ticks(lambda: 0.0),
        now=lambda: NOW + timedelta(seconds=next(clock)),
        jitter=lambda: 0.5,
        reads_nodes=False,
    )
