"""Objects as the API server keeps them: defaults, subresources, columns, names."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from apiserver.harness.api import MERGE, Body, Cluster, RefusedError, path_of
from apiserver.harness.space import Space, fleet_manifest
from localcluster.gobuild import find_program
from localcluster.paths import find_paths

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
DEADLINES = {
    "formingSeconds": 120,
}


@pytest.fixture
def stored(space: Space) -> Iterator[Body]:
    """A fleet that no operator serves, with a status."""
    body = space.cluster.create(fleet_manifest(space.name, "probe", replicas=3))
    status = {
        "replicas": 2,
        "readyReplicas": 1,
        "labelSelector": "rolloutfleet.io/fleet=probe,rolloutfleet.io/role=leader",
        "weights": {"epoch": 2, "version": 7, "target": 7, "skew": 0},
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "observedGeneration": 1,
                "lastTransitionTime": "2026-01-02T03:04:05Z",
                "reason": "EnginesStarting",
                "message": "1 of 3 engines serve",
            }
        ],
    }
    yield space.cluster.merge("RolloutFleet", space.name, body["metadata"]["name"], {"status": status}, "status")
    space.cluster.delete("RolloutFleet", space.name, "probe")


@pytest.mark.row("A01")
def test_what_is_read_back_is_what_was_sent_and_the_defaults(space: Space):
    sent = {
        "model": {"name": "org/model", "maxModelLength": 4096},
        "parallelism": {"tensor": 2},
        "engine": {
            "args": {"max-num-seqs": "64"},
            "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "resources": {"limits": {"memory": "16Gi"}},
        },
        "template": {"affinity": {"nodeAffinity": {"x": [1]}}, "tolerations": [{"operator": "Exists"}]},
    }
    manifest = fleet_manifest(space.name, "read-back") | {"spec": sent}
    space.cluster.create(manifest, fieldValidation="Strict")
    spec = space.cluster.get("RolloutFleet", space.name, "read-back")["spec"]
    deadlines = spec["refit"].pop("deadlines")
    assert spec == {
        "replicas": 1,
        "model": {"name": "org/model", "maxModelLength": 4096, "loadFormat": "Auto", "dtype": "Auto"},
        "parallelism": {"tensor": 2, "pipeline": 1, "expert": 1},
        "fabric": {"preset": "None", "rdmaDevices": 1, "hostNetwork": False},
        "engine": sent["engine"],
        "placement": {"gpuResource": "nvidia.com/gpu"},
        "template": {**sent["template"], "hostIPC": False, "terminationGracePeriodSeconds": 30},
        "refit": {
            "transport": "Auto",
            "staging": "Auto",
            "pause": "Keep",
            "cache": "Reset",
            "minReady": 1,
            "onFailure": "ServeOld",
            "strategy": "AllAtOnce",
            "verify": "Bytes",
            "lateJoin": "Peer",
        },
        "recovery": {
            "restartBudget": 5,
            "windowSeconds": 3600,
            "backoffCapSeconds": 300,
            "nodeLossSeconds": 30,
            "quarantineNodes": {"afterFailures": 3, "seconds": 1800},
        },
        "suspend": False,
        "weights": {},
    }
    assert deadlines
    assert all(name.endswith("Seconds") and seconds > 0 for name, seconds in deadlines.items())


def test_a_weightsync_gets_its_floor(space: Space):
    spec = {"fleetRef": {"name": "nobody"}, "trainer": {}}
    metadata = {"name": "read-back", "namespace": space.name}
    body = {"apiVersion": "rolloutfleet.io/v1alpha1", "kind": "WeightSync", "metadata": metadata, "spec": spec}
    stored = space.cluster.create(body, fieldValidation="Strict")
    assert stored["spec"] == {**spec, "floor": {"epoch": 0, "version": 0}}


def test_spec_and_status_are_written_apart(space: Space, stored: Body):
    generation = stored["metadata"]["generation"]
    through_status = {"spec": {"replicas": 9}, "status": {"readyReplicas": 3}}
    after = space.cluster.merge("RolloutFleet", space.name, "probe", through_status, "status")
    assert (after["spec"]["replicas"], after["status"]["readyReplicas"]) == (3, 3)
    assert after["metadata"]["generation"] == generation
    through_spec = {"spec": {"replicas": 4}, "status": {"readyReplicas": 0}}
    after = space.cluster.merge("RolloutFleet", space.name, "probe", through_spec)
    assert (after["spec"]["replicas"], after["status"]["readyReplicas"]) == (4, 3)
    assert after["metadata"]["generation"] == generation + 1


def test_the_scale_subresource_reads_and_sets_replicas(space: Space, stored: Body):
    scale = space.cluster.get("RolloutFleet", space.name, "probe", "scale")
    assert (scale["kind"], scale["spec"], scale["status"]["replicas"]) == ("Scale", {"replicas": 3}, 2)
    assert scale["status"]["selector"] == stored["status"]["labelSelector"]
    path = path_of("RolloutFleet", space.name, "probe", "scale")
    space.cluster.call("PATCH", path, {"spec": {"replicas": 5}}, MERGE)
    assert space.cluster.get("RolloutFleet", space.name, "probe")["spec"]["replicas"] == 5
    with pytest.raises(RefusedError, match="should be less than or equal to 1000"):
        space.cluster.call("PATCH", path, {"spec": {"replicas": 1001}}, MERGE)


def test_tables_show_what_people_ask_for(space: Space, stored: Body):
    table = space.cluster.call("GET", path_of("RolloutFleet", space.name, "probe"), accept=TABLE)
    shown = dict(zip((c["name"] for c in table["columnDefinitions"]), table["rows"][0]["cells"], strict=True))
    assert shown.pop("Age")
    assert shown == {
        "Name": "probe",
        "Ready": "False",
        "Engines": 3,
        "Serving": 1,
        "Weights": 7,
        "Reason": "EnginesStarting",
        "Model": "tiny",
        "Message": "1 of 3 engines serve",
        "Behind": 0,
        "Stale": None,
    }
    wide = [column["name"] for column in table["columnDefinitions"] if column["priority"]]
    assert wide == ["Model", "Message", "Behind", "Stale"]


def test_tables_of_weightsyncs_show_who_works_for_whom(space: Space):
    metadata = {"name": "columns", "namespace": space.name}
    spec = {"fleetRef": {"name": "demo"}, "trainer": {}}
    body = {"apiVersion": "rolloutfleet.io/v1alpha1", "kind": "WeightSync", "metadata": metadata, "spec": spec}
    space.cluster.create(body)
    active = {
        "type": "Active",
        "status": "True",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "reason": "ServingFleet",
    }
    status = {"phase": "Transferring", "epoch": 3, "version": 8, "conditions": [active], "session": {"trainer": "grpo"}}
    status["lastRefit"] = {"transport": "Layout", "pauseSeconds": 0.0071}
    space.cluster.merge("WeightSync", space.name, "columns", {"status": status}, "status")
    table = space.cluster.call("GET", path_of("WeightSync", space.name, "columns"), accept=TABLE)
    shown = dict(zip((c["name"] for c in table["columnDefinitions"]), table["rows"][0]["cells"], strict=True))
    assert shown.pop("Age")
    assert shown == {
        "Name": "columns",
        "Fleet": "demo",
        "Active": "True",
        "Phase": "Transferring",
        "Epoch": 3,
        "Version": 8,
        "Trainer": "grpo",
        "Transport": "Layout",
        "Pause": 0.0071,
    }


def test_a_status_of_an_unknown_phase_is_refused(space: Space, stored: Body):
    metadata = {"name": "phases", "namespace": space.name}
    spec = {"fleetRef": {"name": "demo"}, "trainer": {}}
    body = {"apiVersion": "rolloutfleet.io/v1alpha1", "kind": "WeightSync", "metadata": metadata, "spec": spec}
    space.cluster.create(body)
    with pytest.raises(RefusedError, match="Unsupported value"):
        space.cluster.merge("WeightSync", space.name, "phases", {"status": {"phase": "Dreaming"}}, "status")


@pytest.mark.parametrize(
    ("name", "kind"), [("rlfleet", "rolloutfleet"), ("rl", "rolloutfleet"), ("weightsync", "weightsync")]
)
def test_kubectl_finds_the_kinds_by_their_short_names_and_category(space: Space, stored: Body, name: str, kind: str):
    kubectl = find_program(find_paths(os.environ), "kubectl", os.environ)
    command = [kubectl, "--kubeconfig", space.cluster.kubeconfig, "get", name, "-n", space.name, "-o", "name"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kind}.rolloutfleet.io/" in done.stdout


def test_kubectl_explains_every_field_of_the_first_level(cluster: Cluster):
    kubectl = find_program(find_paths(os.environ), "kubectl", os.environ)
    command = [kubectl, "--kubeconfig", cluster.kubeconfig, "explain", "rolloutfleet.spec"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("engine", "model", "parallelism", "placement", "refit", "replicas", "suspend", "template"):
        assert f"{name} " in done.stdout.replace("\t", " ")
