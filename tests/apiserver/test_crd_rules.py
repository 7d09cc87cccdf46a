"""Every rule that the CRDs carry: what the API server accepts, and the words with which it refuses."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from apiserver.crd_cases import ACCEPTED, COMMITTED, FLEET, REJECTIONS, SYNC, Rejection, body, checkpoint, model
from apiserver.harness.api import Body, Cluster, RefusedError, path_of
from apiserver.harness.process import CRD_FOLDER


def rules_of(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """(path, message) of every validation rule of a schema."""
    yield from ((path, rule["message"]) for rule in node.get("x-kubernetes-validations", ()))
    for name, child in node.get("properties", {}).items():
        yield from rules_of(child, f"{path}.{name}")
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(node.get(key), dict):
            yield from rules_of(node[key], path + mark)


def refusal(cluster: Cluster, manifest: Body) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        cluster.create(manifest, dryRun="All", fieldValidation="Strict")
    return caught.value


def test_every_rule_of_the_crds_has_a_rejection_here():
    carried = set()
    for file in sorted(CRD_FOLDER.glob("rolloutfleet.io_*.yaml")):
        crd = yaml.safe_load(file.read_text())
        (version,) = crd["spec"]["versions"]
        found = list(rules_of(version["schema"]["openAPIV3Schema"]))
        carried |= {(crd["spec"]["names"]["kind"], *rule) for rule in found}
    of_status = {(FLEET, "", COMMITTED)}  # below, for it needs a status
    assert carried == {(case.kind, case.path, case.rule) for case in REJECTIONS} | of_status


def test_a_checkpoint_that_the_fleet_is_past_is_refused_with_both_versions(cluster: Cluster):
    path = path_of(FLEET, "default", "probe")
    cluster.create(body(FLEET, {}))
    try:
        status = {
            "apiVersion": "rolloutfleet.io/v1alpha1",
            "kind": FLEET,
            "metadata": {"name": "probe", "namespace": "default"},
        }
        cluster.apply(status | {"status": {"weights": {"version": 7}}}, "test", "status")
        for version in (6, 7):
            refused = body(FLEET, checkpoint(version, uri="s3://b/k"))
            refused["metadata"]["resourceVersion"] = cluster.get(FLEET, "default", "probe")["metadata"][
                "resourceVersion"
            ]
            with pytest.raises(RefusedError) as caught:
                cluster.call("PUT", path, refused)
            ((_, told),) = caught.value.causes
            assert told.endswith(
                f"weights.checkpoint.version {version} is not above 7, the version that the fleet has committed"
            )
        taken = body(FLEET, checkpoint(8, uri="s3://b/k"))
        taken["metadata"]["resourceVersion"] = cluster.get(FLEET, "default", "probe")["metadata"]["resourceVersion"]
        cluster.call("PUT", path, taken)
        # A trainer's version passes the checkpoint's: the spec stays as it is, and other fields may change.
        cluster.apply(status | {"status": {"weights": {"version": 9}}}, "test", "status")
        other = body(FLEET, checkpoint(8, uri="s3://b/k") | {"replicas": 3})
        other["metadata"]["resourceVersion"] = cluster.get(FLEET, "default", "probe")["metadata"]["resourceVersion"]
        cluster.call("PUT", path, other)
    finally:
        cluster.delete(FLEET, "default", "probe")


@pytest.mark.parametrize("case", REJECTIONS, ids=str)
def test_a_rule_refuses_in_its_own_words_and_alone(cluster: Cluster, case: Rejection):
    refused = body(case.kind, case.spec, case.name)
    where = case.field or case.path.removeprefix(".")
    if case.before is None:
        answer = refusal(cluster, refused)
    else:
        stored = cluster.create(body(case.kind, case.before, case.name))
        refused["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        try:
            with pytest.raises(RefusedError) as caught:
                cluster.call("PUT", path_of(case.kind, "default", case.name), refused)
        finally:
            cluster.delete(case.kind, "default", case.name)
        answer = caught.value
    assert answer.code == 422
    ((named, told),) = answer.causes
    assert (named, told.partition(": ")[2].removeprefix(f'"{_value(refused, where)}": ')) == (where, case.told)


def _value(manifest: Body, where: str) -> Any:
    """The string at a path such as ``spec.engine.env[0].name``, for the API server quotes it before the message."""
    found: Any = manifest
    for part in where.replace("[", ".").replace("]", "").split("."):
        if isinstance(found, list):
            found = found[int(part)]
        elif isinstance(found, Mapping):
            found = found.get(part)
    return found


@pytest.mark.parametrize("case", sorted(ACCEPTED))
def test_what_breaks_no_rule_is_accepted(cluster: Cluster, case: str):
    _, manifest = ACCEPTED[case]
    cluster.create(manifest, dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize(
    ("kind", "spec", "where", "told"),
    [
        (FLEET, {"replicas": 1001}, "spec.replicas", "should be less than or equal to 1000"),
        (FLEET, {"replicas": "two"}, "spec.replicas", 'must be of type integer: "string"'),
        (FLEET, model(name=""), "spec.model.name", "should be at least 1 chars long"),
        (FLEET, {"parallelism": {"tensor": 65}}, "spec.parallelism.tensor", "should be less than or equal to 64"),
        (FLEET, model(loadFormat="auto"), "spec.model.loadFormat", 'supported values: "Auto", "Dummy"'),
        (FLEET, model(dtype="half"), "spec.model.dtype", 'supported values: "Auto", "BFloat16", "Float16", "Float32"'),
        (FLEET, model(maxModelLength=0), "spec.model.maxModelLength", "should be greater than or equal to 1"),
        (FLEET, {"refit": {"pause": "Now"}}, "spec.refit.pause", 'supported values: "Keep", "Wait", "Abort"'),
        (FLEET, model(source={"hostPath": {"path": "m"}}), "spec.model.source.hostPath.path", "should match '^/.*$'"),
        (FLEET, {"suspend": "yes"}, "spec.suspend", 'must be of type boolean: "string"'),
        (
            FLEET,
            {"engine": {"args": {f"a{n}": "" for n in range(65)}}},
            "spec.engine.args",
            "must have at most 64 items",
        ),
        (FLEET, {"engine": {"env": [{"name": "A"}] * 2}}, "spec.engine.env[1]", '{"name":"A"}'),
        (SYNC, {"fleetRef": {"name": "a" * 41}}, "spec.fleetRef.name", "may not be more than 40 bytes"),
        (SYNC, {"floor": {"epoch": -1}}, "spec.floor.epoch", "should be greater than or equal to 0"),
    ],
)
def test_the_schema_refuses_and_names_the_field(cluster: Cluster, kind: str, spec: Body, where: str, told: str):
    causes = refusal(cluster, body(kind, spec)).causes
    assert any(named == where and told in message for named, message in causes), causes


@pytest.mark.row("A02", "A03")
@pytest.mark.parametrize("tensor", [0, -1])
def test_a_tensor_parallel_size_below_one_cannot_be_stored(cluster: Cluster, tensor: int):
    ((where, told),) = refusal(cluster, body(FLEET, {"parallelism": {"tensor": tensor}})).causes
    assert where == "spec.parallelism.tensor"
    assert told.endswith("should be greater than or equal to 1")


@pytest.mark.row("A09")
@pytest.mark.parametrize(
    ("kind", "spec", "missing"),
    [
        (FLEET, {}, {"spec.model"}),
        (FLEET, {"model": {"source": {"persistentVolumeClaim": {}}}, "engine": {"env": [{"value": "1"}]}},
         {"spec.model.name", "spec.model.source.persistentVolumeClaim.claimName", "spec.engine.env[0].name"}),
        (SYNC, {}, {"spec.fleetRef"}),
    ],
)  # fmt: skip
def test_one_answer_names_every_required_key_that_is_missing(
    cluster: Cluster, kind: str, spec: Body, missing: set[str]
):
    manifest = body(kind, {}) | {"spec": spec}
    required = {where for where, told in refusal(cluster, manifest).causes if told == "Required value"}
    assert required == missing


@pytest.mark.parametrize("field", ["replica", "model.nam", "template.nodeselector", "engine.env.0.valu"])
def test_an_unknown_field_is_refused_where_fields_are_checked_strictly(cluster: Cluster, field: str):
    spec: Body = {"model": {"name": "tiny"}, "template": {}, "engine": {"env": [{"name": "A"}]}}
    *parents, leaf = field.split(".")
    inner: Any = spec
    for part in parents:
        inner = inner[int(part)] if part.isdigit() else inner[part]
    inner[leaf] = "x"
    answer = refusal(cluster, body(FLEET, spec))
    assert answer.code == 400
    shown = field.replace(".0.", "[0].")
    told = f'strict decoding error: unknown field "spec.{shown}"'
    assert answer.message == f'RolloutFleet in version "v1alpha1" cannot be handled as a RolloutFleet: {told}'


def test_unknown_parts_of_a_pods_volume_are_kept(cluster: Cluster):
    volume = {"name": "data", "csi": {"driver": "example.com", "volumeAttributes": {"a": "b"}}}
    stored = cluster.create(body(FLEET, {"template": {"volumes": [volume]}}), dryRun="All", fieldValidation="Strict")
    assert stored["spec"]["template"]["volumes"] == [volume]
