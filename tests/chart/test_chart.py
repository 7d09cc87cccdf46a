"""The chart as Helm renders it: valid with every file of values, strict about wrong ones, and what it must hold."""

import copy
import json
import operator
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutfleet_operator.__main__ import build_parser, read_config
from rolloutfleet_operator.cluster.access import FLEET_RULES, LEASE_RULES, Rule
from rolloutfleet_operator.config import Images

CHART = Path(__file__).parents[2] / "charts" / "rolloutfleet"
VALUES = sorted(path.name for path in (CHART / "ci").glob("*-values.yaml"))
VERSIONS = ("1.30.0", "1.35.4")


def objects_of(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Objects of one kind by namespace/name, or by name alone."""
    found = {}
    for document in documents:
        if document["kind"] == kind:
            metadata = document["metadata"]
            found["/".join(filter(None, (metadata.get("namespace"), metadata["name"])))] = document
    return found


def rules_of(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Verbs by API group and resource."""
    table: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                table.setdefault((group, resource), set()).update(rule["verbs"])
    return table


def table_of(rules: tuple[Rule, ...]) -> dict[tuple[str, str], set[str]]:
    """The operator's own list in the shape of :func:`rules_of`."""
    return {(rule.group, rule.resource): set(rule.verbs) for rule in rules}


def leaves(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of all values that the chart documents."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    for name in prefix:
        schema = schema["properties"][name]
    found = set()
    for name, value in values.items():
        nested = isinstance(value, dict) and "properties" in schema["properties"][name]
        found |= leaves(value, (*prefix, name)) if nested else {(*prefix, name)}
    return found


def test_lint_finds_nothing(helm):
    for name in VALUES:
        answer = helm.run("lint", "CHART", "--strict", "--kube-version", VERSIONS[1], "--values", f"{CHART}/ci/{name}")
        assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("kubernetes", VERSIONS)
@pytest.mark.parametrize("name", [None, *VALUES])
def test_every_object_is_whole_and_labelled(helm, name: str | None, kubernetes: str):
    documents = helm.render(*(("--values", f"{CHART}/ci/{name}") if name else ()), kubernetes=kubernetes)
    for document in documents:
        assert document["apiVersion"]
        assert document["metadata"]["name"]
        if document["kind"] != "CustomResourceDefinition":
            assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "release"


def test_a_kubernetes_that_is_too_old_is_refused(helm):
    answer = helm.run("template", "release", "CHART", "--kube-version", "1.29.9")
    assert answer.returncode != 0
    assert "chart requires kubeVersion: >=1.30.0-0" in answer.stderr


def test_the_files_of_values_touch_every_value():
    defaults = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    touched = set().union(*(leaves(yaml.safe_load((CHART / "ci" / name).read_text())) for name in VALUES))
    assert defaults - touched == set()
    assert touched - defaults == set()


def test_every_value_changes_what_is_rendered(helm, tmp_path: Path):
    """A value that nothing reads would be accepted in silence."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    everything = yaml.safe_load((CHART / "ci" / "everything-values.yaml").read_text())
    rendered = helm.render("--values", f"{CHART}/ci/everything-values.yaml")
    changed = tmp_path / "values.yaml"
    for path in sorted(leaves(defaults)):
        values = copy.deepcopy(everything)
        parent = reduce(operator.getitem, path[:-1], values)
        default = reduce(operator.getitem, path, defaults)
        parent[path[-1]] = default if parent[path[-1]] != default else not default
        changed.write_text(yaml.safe_dump(values))
        assert helm.render("--values", str(changed)) != rendered, ".".join(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("operator.imagee=x", "additional properties 'imagee' not allowed"),
        ("wroker.image=x", "additional properties 'wroker' not allowed"),
        ("operator.logFormat=xml", "value must be one of 'json', 'text'"),
        ("operator.image=", "minLength: got 0, want 1"),
        ("operator.imagePullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
        ("operator.terminationGracePeriodSeconds=0", "minimum: got 0, want 1"),
        ("crds.enabled=maybe", "got string, want boolean"),
        ("watch.namespaces={Team}", "does not match pattern"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm, setting: str, message: str):
    answer = helm.run("template", "release", "CHART", "--kube-version", VERSIONS[1], "--set", setting)
    assert answer.returncode != 0
    assert message in answer.stderr


def test_a_foreign_account_needs_a_name(helm):
    answer = helm.run(
        "template", "release", "CHART", "--kube-version", VERSIONS[1], "--set", "serviceAccount.create=false"
    )
    assert "serviceAccount.name is needed when serviceAccount.create is false" in answer.stderr


def test_rendering_twice_gives_the_same_bytes(helm):
    arguments = ("template", "release", "CHART", "--kube-version", VERSIONS[1])
    assert helm.run(*arguments).stdout == helm.run(*arguments).stdout


def test_crds_are_those_of_the_api_and_are_kept(helm):
    rendered = objects_of(helm.render(), "CustomResourceDefinition")
    sources = [yaml.safe_load(path.read_text()) for path in (CHART.parents[1] / "crds").glob("rolloutfleet.io_*.yaml")]
    assert len(sources) == 2
    for source in sources:
        crd = rendered[source["metadata"]["name"]]
        assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert crd == source


def test_crds_can_be_let_go_or_left_out(helm):
    let_go = objects_of(helm.render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert [crd for crd in let_go.values() if "annotations" in crd["metadata"]] == []
    assert objects_of(helm.render("--set", "crds.enabled=false"), "CustomResourceDefinition") == {}


def test_the_operator_runs_alone_and_without_privilege(helm):
    deployment = objects_of(helm.render(), "Deployment")["fleet-system/release-rolloutfleet"]["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "-m", "rolloutfleet_operator"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert container["resources"]["requests"] == {"cpu": "50m", "memory": "256Mi"}


def test_the_operator_understands_every_variable_that_it_is_given(helm):
    """Read back by the operator's own command line, so that a renamed variable cannot be forgotten here."""
    documents = helm.render("--values", f"{CHART}/ci/everything-values.yaml")
    (container,) = objects_of(documents, "Deployment")["fleet-system/rollouts"]["spec"]["template"]["spec"][
        "containers"
    ]
    environment = {entry["name"]: entry.get("value", "fleet-system") for entry in container["env"]}
    config, options = read_config(container["args"], environment)
    assert config.images == Images(
        worker="registry.example.com/rolloutfleet/worker:0.1.0",
        operator=f"registry.example.com/rolloutfleet/operator@sha256:{'0' * 64}",
    )
    assert config.namespaces == ("team-a",)
    assert (config.lease_name, config.lease_namespace) == ("rollouts", "fleet-system")
    assert config.resync_seconds == 60
    assert (options.debug, options.log_format) == (True, "text")
    assert config.liveness_port == container["ports"][0]["containerPort"]
    help_text = build_parser({}).format_help()
    ours = [name for name in environment if name.startswith("ROLLOUTFLEET_")]
    assert [name for name in ours if name not in help_text] == []


def test_pods_of_the_operator_keep_their_identity_whatever_labels_are_added(helm):
    label = "app.kubernetes.io/name=mine"
    deployment = objects_of(
        helm.render("--set", f"operator.podLabels.{label.replace('.', chr(92) + '.')}"), "Deployment"
    )["fleet-system/release-rolloutfleet"]["spec"]
    assert deployment["template"]["metadata"]["labels"] == deployment["selector"]["matchLabels"]


def test_the_whole_cluster_is_served_by_one_cluster_role(helm):
    documents = helm.render()
    roles = objects_of(documents, "ClusterRole")
    rules = rules_of(roles["release-rolloutfleet-operator"])
    assert rules["", "nodes"] == {"list", "watch"}
    assert rules.items() >= table_of(FLEET_RULES).items()
    assert list(objects_of(documents, "Role")) == ["fleet-system/release-rolloutfleet-lease"]


def test_namespaces_are_served_by_roles_without_any_cluster_right(helm):
    documents = helm.render("--values", f"{CHART}/ci/namespaced-values.yaml")
    assert objects_of(documents, "ClusterRole") == {}
    assert objects_of(documents, "ClusterRoleBinding") == {}
    assert list(objects_of(documents, "Role")) == [
        "team-a/release-rolloutfleet-fleets",
        "team-b/release-rolloutfleet-fleets",
        "fleet-system/release-rolloutfleet-lease",
    ]
    assert rules_of(objects_of(documents, "Role")["team-a/release-rolloutfleet-fleets"]) == table_of(FLEET_RULES)
    assert rules_of(objects_of(documents, "Role")["fleet-system/release-rolloutfleet-lease"]) == table_of(LEASE_RULES)
    for binding in objects_of(documents, "RoleBinding").values():
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "fleet-operator", "namespace": "fleet-system"}
        ]


@pytest.mark.parametrize("arguments", [(), ("--values", f"{CHART}/ci/namespaced-values.yaml")])
def test_no_role_holds_a_wildcard_or_more_of_secrets_than_it_needs(helm, arguments: tuple[str, ...]):
    documents = helm.render(*arguments)
    for kind in ("Role", "ClusterRole"):
        for name, role in objects_of(documents, kind).items():
            for (group, resource), verbs in rules_of(role).items():
                assert "*" not in {group, resource, *verbs}, name
                assert not (resource == "secrets" and verbs - {"get", "create", "patch"}), name


def test_the_operator_holds_what_it_grants_to_sync_jobs(helm):
    """The API server refuses a Role with rights that its author lacks."""
    rules = rules_of(objects_of(helm.render(), "ClusterRole")["release-rolloutfleet-operator"])
    assert rules["rolloutfleet.io", "weightsyncs"] >= {"get"}
    assert rules["rolloutfleet.io", "weightsyncs/status"] >= {"get", "patch"}
    assert rules["", "configmaps"] >= {"get", "list", "watch"}


def test_viewers_read_and_editors_write(helm):
    roles = objects_of(helm.render(), "ClusterRole")
    view, edit = roles["release-rolloutfleet-view"], roles["release-rolloutfleet-edit"]
    aggregation = "rbac.authorization.k8s.io/aggregate-to-"
    assert {key.removeprefix(aggregation) for key in view["metadata"]["labels"] if key.startswith(aggregation)} == {
        "view",
        "edit",
        "admin",
    }
    assert {key.removeprefix(aggregation) for key in edit["metadata"]["labels"] if key.startswith(aggregation)} == {
        "edit",
        "admin",
    }
    assert rules_of(view)["rolloutfleet.io", "rolloutfleets"] == {"get", "list", "watch"}
    assert "get" not in rules_of(edit)["rolloutfleet.io", "rolloutfleets"]


def test_helm_test_asks_as_the_operator(helm):
    pod = objects_of(helm.render(), "Pod")["fleet-system/release-rolloutfleet-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["serviceAccountName"] == "release-rolloutfleet"
    (container,) = pod["spec"]["containers"]
    script = container["command"][-1]
    assert script == (CHART / "files" / "installation.py").read_text()


def test_notes_name_the_first_fleet_and_the_order_of_removal(helm, tmp_path: Path):
    chart = tmp_path / "rolloutfleet"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "notes.yaml").write_text(
        'notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | quote }}\n'
    )
    arguments = ("--show-only", "templates/notes.yaml", "--set", "watch.namespaces={team-b,team-a}")
    (document,) = helm.render(*arguments, chart=chart)
    notes = document["notes"]
    assert "It watches the namespaces team-a, team-b." in notes
    assert "kind: RolloutFleet" in notes
    removal = [notes.index(text) for text in ("delete rolloutfleets", "helm uninstall release", "delete crd")]
    assert removal == sorted(removal)
