"""The chart in a cluster: what Helm installs is enough for the operator and no more, and fleets outlive every release."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from apiserver.harness.api import APPLY, Body, Cluster, path_of
from apiserver.harness.crds import CRD_NAMES, apply_crds, install_crds, remove_crds
from apiserver.harness.process import EXIT_LEASE_LOST, LEASE, ROOT, OperatorProcess, operator_environment
from apiserver.harness.space import Fleet, Space, condition, fleet_manifest, make_namespace
from localcluster.gobuild import find_module_source, find_program
from localcluster.paths import find_paths
from rolloutfleet_operator.cluster.access import FLEET_RULES, LEASE_RULES, NODE_RULES, Rule

CHART = ROOT / "charts" / "rolloutfleet"
RELEASE = "rolloutfleet"
EXIT_SETUP = 1
MONITORING = ("podmonitors", "prometheusrules")


@dataclass
class Release:
    """One release of the chart, and the operator that its Deployment describes."""

    cluster: Cluster
    namespace: str
    folder: Path
    operators: list[OperatorProcess] = field(default_factory=list)

    def helm(self, *arguments: str) -> str:
        program = find_program(find_paths(os.environ), "helm", os.environ)
        environment = {"HOME": str(self.folder), "PATH": os.environ["PATH"], "KUBECONFIG": self.cluster.kubeconfig}
        command = [program, *arguments, "--namespace", self.namespace]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deployment(self) -> Body:
        (found,) = self.cluster.list("Deployment", self.namespace)
        return found

    def start_operator(self) -> OperatorProcess:
        """The process of the Deployment's pod: its command, its environment, its service account's rights."""
        pod = self.deployment()["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["python3", "-m", "rolloutfleet_operator"]
        told = {
            entry["name"]: self.namespace if "valueFrom" in entry else entry.get("value", "")
            for entry in container["env"]
        }
        token = self.cluster.token_of(self.namespace, pod["serviceAccountName"])
        kubeconfig = self.cluster.write_kubeconfig(self.folder / "kubeconfig", token)
        self.operators.append(OperatorProcess(kubeconfig, told))
        return self.operators[-1]


@pytest.fixture(scope="module")
def bare(admin: Cluster) -> Iterator[Cluster]:
    """A cluster that does not know our kinds until a test brings them; later modules find them as they are in ``crds/``."""
    remove_crds(admin)
    yield admin
    install_crds(admin)


@pytest.fixture(scope="module")
def place(bare: Cluster, nodes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """A namespace for the release; nothing is installed yet."""
    made = Release(bare, make_namespace(bare, "chart"), tmp_path_factory.mktemp("helm"))
    yield made
    if bare.find("CustomResourceDefinition", "", CRD_NAMES[0]) is not None:
        Space(bare, made.namespace).clear()
    if made.helm("list", "--short").strip():
        made.helm("uninstall", RELEASE, "--wait")
    bare.delete("Namespace", "", made.namespace)


@pytest.fixture(scope="module")
def _monitoring(admin: Cluster) -> Iterator[None]:
    """Prometheus Operator's own kinds, as far as the chart makes objects of them, while a cluster has none."""
    module = "github.com/prometheus-operator/prometheus-operator"
    folder = find_module_source(find_paths(os.environ), "monitoring", module) / "example" / "prometheus-operator-crd"
    files = {
        f"{plural}.monitoring.coreos.com": folder / f"monitoring.coreos.com_{plural}.yaml" for plural in MONITORING
    }
    missing = [name for name in files if admin.find("CustomResourceDefinition", "", name) is None]
    apply_crds(admin, [files[name] for name in missing])
    yield
    remove_crds(admin, missing)


@pytest.fixture
def release(place: Release) -> Iterator[Release]:
    """The chart, installed; operators that a test leaves running are killed."""
    if not place.helm("list", "--short").strip():
        place.helm("install", RELEASE, str(CHART), "--wait", "--timeout", "60s")
    yield place
    for operator in place.operators:
        if operator.alive:
            operator.kill()
    place.operators.clear()
    place.cluster.delete("Lease", place.namespace, LEASE)


def crd(cluster: Cluster, name: str) -> Body:
    return cluster.get("CustomResourceDefinition", "", name)


def make_fleet(release: Release, name: str, **spec: Any) -> Fleet:
    release.cluster.create(fleet_manifest(release.namespace, name, **spec))
    return Fleet(release.cluster, release.namespace, name)


def test_an_operator_ends_with_a_word_when_the_kinds_are_not_served(place: Release):
    told = operator_environment(lease_namespace=place.namespace)
    operator = OperatorProcess(place.cluster.kubeconfig, told)
    assert operator.await_end() == EXIT_SETUP
    (record,) = operator.records
    assert record["message"] == (
        "the API server does not serve rolloutfleets, rolloutfleets/status, weightsyncs, weightsyncs/status of "
        "rolloutfleet.io/v1alpha1: install the CRDs (folder crds/)"
    )


@pytest.mark.usefixtures("_monitoring")
@pytest.mark.parametrize("values", ["", *sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))])
def test_the_api_server_accepts_every_object_of_the_chart(place: Release, values: str):
    cluster = place.cluster
    options = ["--kube-version", cluster.call("GET", "/version")["gitVersion"]]
    options += ["--values", str(CHART / "ci" / values)] if values else []
    rendered = [d for d in yaml.safe_load_all(place.helm("template", RELEASE, str(CHART), *options)) if d]
    assert "Deployment" in {document["kind"] for document in rendered}
    query = {"fieldManager": "chart", "force": "true", "fieldValidation": "Strict"}
    for document in rendered:
        metadata = document["metadata"]
        # The chart makes no namespaces; what is meant for another one is asked for in ours.
        metadata["namespace"] = place.namespace
        path = path_of(document["kind"], place.namespace, metadata["name"])
        if document["kind"] == "Pod":
            # A pod is refused, even in a dry run, while its account is missing.
            account = {"name": document["spec"]["serviceAccountName"], "namespace": place.namespace}
            cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}, "apiserver-tier")
        if path_of(document["kind"]) == path_of(document["kind"], place.namespace):
            del metadata["namespace"]
        cluster.call("PATCH", path, document, APPLY, dryRun="All", **query)
        if document["kind"] == "Pod":
            cluster.delete("ServiceAccount", place.namespace, document["spec"]["serviceAccountName"])


def test_the_account_of_the_chart_suffices_for_all_that_a_fleet_needs(release: Release):
    operator = release.start_operator()
    operator.await_lease()
    fleet = make_fleet(release, "granted", replicas=2)
    fleet.await_ready(2)
    namespace, cluster = release.namespace, release.cluster
    fleet.patch(engine={"image": "registry.example/worker:2"}, refit={"pause": "Abort"})
    fleet.await_ready(2)
    cluster.merge("Service", namespace, "granted", {"spec": {"selector": {"rolloutfleet.io/fleet": "x"}}})
    cluster.wait(
        "the Service is mended",
        "Service",
        namespace,
        lambda state: state["granted"]["spec"]["selector"]["rolloutfleet.io/fleet"] == "granted",
        name="granted",
    )
    emptied = cluster.merge("Secret", namespace, "granted-token", {"data": None})
    assert "data" not in emptied
    first = cluster.get("WeightSync", namespace, "granted")["metadata"]["uid"]
    cluster.delete("WeightSync", namespace, "granted")
    cluster.wait(
        "a new WeightSync",
        "WeightSync",
        namespace,
        lambda state: state.get("granted", {"metadata": {"uid": first}})["metadata"]["uid"] != first,
        name="granted",
    )
    fleet.patch(suspend=True)
    fleet.await_condition("Ready", "False", "Suspended")
    cluster.wait(
        "a new token", "Secret", namespace, lambda state: "data" in state["granted-token"], name="granted-token"
    )
    fleet.patch(suspend=False)
    fleet.await_ready(2)
    fleet.delete()
    # Not its WeightSync: the garbage collector looks for new kinds twice a minute.
    cluster.await_gone("RolloutFleet", namespace, "granted")
    refused = [r for r in operator.troubles() if r.get("reason") not in ("Blocked", "Conflict")]
    assert refused == []
    assert operator.stop() == 0


def named(rule: Rule, verb: str, where: str) -> str:
    return f"{verb} {rule.resource}{f'.{rule.group}' if rule.group else ''} {where}"


@contextmanager
def rules_taken(release: Release, kind: str, name: str, rules: list[Body]) -> Iterator[None]:
    """A role of the chart with other rules inside the block."""
    scope = release.namespace if kind == "Role" else ""
    before = release.cluster.get(kind, scope, name)["rules"]
    release.cluster.merge(kind, scope, name, {"rules": rules})
    try:
        yield
    finally:
        release.cluster.merge(kind, scope, name, {"rules": before})


def await_denied(release: Release, rule: Rule, verb: str, namespace: str = "") -> None:
    """The authorizer learns of a changed role by a watch of its own; only a question tells when it has."""
    account = release.deployment()["spec"]["template"]["spec"]["serviceAccountName"]
    attributes = {"group": rule.group, "resource": rule.resource, "verb": verb, "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{release.namespace}:{account}", "resourceAttributes": attributes},
    }
    deadline = time.monotonic() + 10
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    while release.cluster.call("POST", path, review)["status"]["allowed"]:
        assert time.monotonic() < deadline, f"{named(rule, verb, namespace)} is still allowed"


def test_a_missing_permission_ends_the_operator_with_its_name(release: Release):
    lease_place = f"in namespace {release.namespace}"
    pods = next(rule for rule in FLEET_RULES if rule.resource == "pods")
    rules = release.cluster.get("ClusterRole", "", f"{RELEASE}-operator")["rules"]
    fewer = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "delete"]}
        if rule["resources"] == ["pods"]
        else rule
        for rule in rules
    ]
    with rules_taken(release, "ClusterRole", f"{RELEASE}-operator", fewer):
        await_denied(release, pods, "delete")
        operator = release.start_operator()
        assert operator.await_end() == EXIT_SETUP
        (record,) = [record for record in operator.records if record["level"] == "critical"]
    head = "the operator's service account lacks these permissions: "
    assert record["message"] == head + named(pods, "delete", "in the cluster")
    with (
        rules_taken(release, "ClusterRole", f"{RELEASE}-operator", []),
        rules_taken(release, "Role", f"{RELEASE}-lease", []),
    ):
        await_denied(release, NODE_RULES[0], "list")
        await_denied(release, LEASE_RULES[0], "update", release.namespace)
        operator = release.start_operator()
        assert operator.await_end() == EXIT_SETUP
        (record,) = [record for record in operator.records if record["level"] == "critical"]
    wanted = [named(rule, verb, "in the cluster") for rule in (*FLEET_RULES, *NODE_RULES) for verb in rule.verbs]
    wanted += [named(rule, verb, lease_place) for rule in LEASE_RULES for verb in rule.verbs]
    assert record["message"] == head + "; ".join(sorted(wanted))


def newer_chart(folder: Path) -> Path:
    """The chart of a later release: its CRD shows one column more, and it has another version."""
    chart = folder / "newer"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "crds" / "rolloutfleet.io_rolloutfleets.yaml"
    text = template.read_text()
    column = "  - additionalPrinterColumns:\n"
    assert text.count(column) == 1
    added = "    - jsonPath: .spec.suspend\n      name: Suspended\n      type: boolean\n"
    template.write_text(text.replace(column, column + added))
    description = chart / "Chart.yaml"
    about = yaml.safe_load(description.read_text())
    description.write_text(yaml.safe_dump(about | {"version": "99.0.0"}))
    return chart


def columns(cluster: Cluster) -> list[str]:
    (version,) = crd(cluster, "rolloutfleets.rolloutfleet.io")["spec"]["versions"]
    return [column["name"] for column in version["additionalPrinterColumns"]]


def test_a_fleet_outlives_upgrade_uninstall_and_another_install(release: Release, tmp_path: Path):
    cluster = release.cluster
    operator = release.start_operator()
    operator.await_lease()
    fleet = make_fleet(release, "lasting", replicas=2)
    before = fleet.await_ready(2)
    children = fleet.child_uids()
    assert "Suspended" not in columns(cluster)

    release.helm("upgrade", RELEASE, str(newer_chart(tmp_path)), "--wait", "--set", "operator.resyncSeconds=60")
    assert "Suspended" in columns(cluster)
    (container,) = release.deployment()["spec"]["template"]["spec"]["containers"]
    assert {"name": "ROLLOUTFLEET_RESYNC_SECONDS", "value": "60"} in container["env"]
    after = fleet.body()
    assert (after["spec"], after["status"], fleet.child_uids()) == (before["spec"], before["status"], children)
    # A changed CRD ends the operator's watches; it goes on with new ones.
    fleet.patch(replicas=3)
    fleet.await_ready(3, seconds=60)
    children = fleet.child_uids()

    release.helm("uninstall", RELEASE, "--wait")
    # Its rights went first, so it may have ended for want of the Lease, and could not give it back; its successor would wait for that.
    assert operator.stop() in {0, EXIT_LEASE_LOST}
    cluster.delete("Lease", release.namespace, LEASE)
    assert cluster.list("Deployment", release.namespace) == []
    for name in CRD_NAMES:
        kept = crd(cluster, name)
        assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert "deletionTimestamp" not in kept["metadata"]
    left = fleet.body()
    assert "deletionTimestamp" not in left["metadata"]
    assert condition(left, "Ready")["status"] == "True"
    assert fleet.child_uids() == children

    release.helm("install", RELEASE, str(CHART), "--wait", "--timeout", "60s")
    assert "Suspended" not in columns(cluster)
    successor = release.start_operator()
    successor.await_lease()
    fleet.patch(replicas=2)
    fleet.await_ready(2)
    gone = {"Pod/lasting-2-0-0"}
    assert fleet.child_uids() == {name: uid for name, uid in children.items() if name not in gone}
    fleet.delete()
    cluster.await_gone("RolloutFleet", release.namespace, "lasting")
    assert successor.troubles() == []
