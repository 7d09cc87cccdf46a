"""Every rule that the CRDs carry: what the API server accepts, and the words with which it refuses."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from apiserver.harness.api import Body, Cluster, RefusedError, path_of
from apiserver.harness.process import CRD_FOLDER
from rolloutfleet_operator.api.arguments import RESERVED_ENV, SHADOWED

FLEET, SYNC = "RolloutFleet", "WeightSync"


@dataclass(frozen=True)
class Rejection:
    """One rule, an object that breaks it alone, and the API server's answer."""

    kind: str
    path: str
    """Where the rule stands in the schema."""
    rule: str
    """The rule's own message in the CRD, which names the rule for the test of completeness."""
    told: str
    """What the user reads."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    name: str = "probe"
    field: str = ""
    """Where the API server says the fault is; the path unless given."""
    before: Mapping[str, Any] | None = None
    """The spec before an update, for rules about transitions."""

    def __str__(self) -> str:
        return f"{self.kind}{self.path}:{self.rule[:40]}"


def body(kind: str, spec: Mapping[str, Any], name: str = "probe") -> Body:
    base: Body = {"model": {"name": "tiny"}} if kind == FLEET else {"fleetRef": {"name": "demo"}, "trainer": {}}
    merged = copy.deepcopy(base) | copy.deepcopy(dict(spec))
    return {
        "apiVersion": "rolloutfleet.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": merged,
    }


def model(**fields: Any) -> Body:
    return {"model": {"name": "tiny", **fields}}


LONG = "a" * 41
NAMES = (
    "metadata.name begins with a letter and holds lower-case letters, digits and dashes alone, "
    "since Services are named after it"
)
ARGUMENTS = (
    "engine.args: names are lower-case words joined by dashes, without leading dashes, such as gpu-memory-utilization"
)
NATIVE = (
    "refit.transport Native needs GPUs, and placement.gpuResource is empty: set Auto or Gloo, or name the GPU resource"
)
GLOO = (
    "refit.transport Gloo is for engines on CPUs, and placement.gpuResource names GPUs: set Auto or Native, or empty it"
)
SOURCES = "model.source needs exactly one of hub, persistentVolumeClaim and hostPath"
MOUNTED = "template.volumeMounts names a volume that template.volumes does not hold"
RESERVED = "keys that begin with rolloutfleet.io/ or app.kubernetes.io/ belong to the operator"


PLACES = "weights.checkpoint needs exactly one of uri, persistentVolumeClaim and hostPath"
RISES = "versions only rise, and another checkpoint, be it an older one, needs a higher version"
NO_FILE = "weights.checkpoint.uri cannot be a file of the pod's image; use persistentVolumeClaim or hostPath"
NO_ROLL = "refit.strategy Rolling has engines take versions over from peers, which refit.lateJoin Wait forbids; set it to Peer"
COMMITTED = "weights.checkpoint.version must be above the fleet's committed version"


def checkpoint(version: int, **place: Any) -> Body:
    return {"weights": {"checkpoint": {"version": version, **place}}}


def counted(where: str) -> Rejection:
    return Rejection(
        FLEET,
        ".spec",
        f"engine.resources.{where} must not hold placement.gpuResource",
        f"engine.resources.{where} holds example.com/gpu, which parallelism.tensor counts already; "
        f"remove it from the {where}",
        {"engine": {"resources": {where: {"example.com/gpu": 1}}}, "placement": {"gpuResource": "example.com/gpu"}},
    )


REJECTIONS = [
    Rejection(
        FLEET,
        "",
        "metadata.name has at most 40 characters, so that names of pods stay valid",
        f"metadata.name {LONG} is longer than 40 characters, and names of pods hold it",
        name=LONG,
        field="<nil>",
    ),
    Rejection(FLEET, "", NAMES, NAMES, name="4engines", field="<nil>"),
    Rejection(FLEET, ".spec", NATIVE, NATIVE, {"refit": {"transport": "Native"}, "placement": {"gpuResource": ""}}),
    Rejection(FLEET, ".spec", GLOO, GLOO, {"refit": {"transport": "Gloo"}}),
    Rejection(
        FLEET,
        ".spec",
        "model.revision needs model.source.hub",
        "model.revision is main but model.source is not the hub; remove one of them",
        model(revision="main", source={"hostPath": {"path": "/m"}}),
    ),
    Rejection(
        FLEET,
        ".spec",
        "refit.minReady must not be above replicas",
        "refit.minReady 3 is above replicas 2; no refit could ever begin",
        {"replicas": 2, "refit": {"minReady": 3}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "refit.rolling needs refit.strategy Rolling",
        "refit.rolling is set but refit.strategy is AllAtOnce; set it to Rolling, or remove refit.rolling",
        {"refit": {"rolling": {"maxUnavailable": 1}}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "refit.rolling.maxUnavailable must not be above replicas",
        "refit.rolling.maxUnavailable 3 is above replicas 2; a roll takes at most all engines at a time",
        {"replicas": 2, "refit": {"strategy": "Rolling", "rolling": {"maxUnavailable": 3}}},
    ),
    counted("limits"),
    counted("requests"),
    Rejection(
        FLEET, ".spec", MOUNTED, MOUNTED, {"template": {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}}
    ),
    Rejection(FLEET, ".spec.engine.args", ARGUMENTS, ARGUMENTS, {"engine": {"args": {"--enforce-eager": ""}}}),
    *(
        Rejection(
            FLEET,
            ".spec.engine.args",
            f"engine.args.{name} is not for users to set: {advice}",
            f"engine.args.{name} is not for users to set: {advice}",
            {"engine": {"args": {name: "1"}}},
        )
        for name, advice in sorted(SHADOWED.items())
    ),
    Rejection(
        FLEET,
        ".spec.engine.env[].name",
        "names that begin with ROLLOUTFLEET_ belong to the operator",
        "engine.env: ROLLOUTFLEET_MODEL begins with ROLLOUTFLEET_, which belongs to the operator; choose another name",
        {"engine": {"env": [{"name": "ROLLOUTFLEET_MODEL", "value": "x"}]}},
        field="spec.engine.env[0].name",
    ),
    *(
        Rejection(
            FLEET,
            ".spec.engine.env[].name",
            f"engine.env: {name} is not for users to set: {advice}",
            f"engine.env: {name} is not for users to set: {advice}",
            {"engine": {"env": [{"name": name, "value": "1"}]}},
            field="spec.engine.env[0].name",
        )
        for name, advice in sorted(RESERVED_ENV.items())
    ),
    Rejection(
        FLEET,
        ".spec.model.name",
        "model.name cannot change",
        "model.name cannot change from tiny to large; make a new fleet for another model",
        {"model": {"name": "large"}},
        before=model(),
    ),
    Rejection(
        FLEET,
        ".spec.model.source",
        SOURCES,
        f"{SOURCES}; given: hub hostPath",
        model(source={"hub": {}, "hostPath": {"path": "/m"}}),
    ),
    *(
        Rejection(
            FLEET,
            f".spec.template.{where}",
            f"template.{where}: {RESERVED}",
            f"template.{where}: {RESERVED}",
            {"template": {where: {"app.kubernetes.io/name": "mine"}}},
        )
        for where in ("annotations", "labels")
    ),
    Rejection(
        FLEET,
        ".spec.template.volumeMounts[].mountPath",
        "/models/model and /var/run/rolloutfleet belong to the operator",
        "template.volumeMounts: /models/model belongs to the operator; mount elsewhere",
        {
            "template": {
                "volumes": [{"name": "data", "emptyDir": {}}],
                "volumeMounts": [{"name": "data", "mountPath": "/models/model"}],
            }
        },
        field="spec.template.volumeMounts[0].mountPath",
    ),
    Rejection(
        FLEET,
        ".spec.template.volumes[].name",
        "volume names that begin with rolloutfleet- belong to the operator",
        "template.volumes: rolloutfleet-token begins with rolloutfleet-, which belongs to the operator; "
        "choose another name",
        {"template": {"volumes": [{"name": "rolloutfleet-token", "emptyDir": {}}]}},
        field="spec.template.volumes[0].name",
    ),
    Rejection(
        FLEET,
        ".spec.weights.checkpoint",
        PLACES,
        f"{PLACES}; given: uri hostPath",
        checkpoint(1, uri="s3://b/k", hostPath={"path": "/m"}),
    ),
    Rejection(
        FLEET,
        ".spec.weights.checkpoint",
        "weights.checkpoint.version only rises, and another checkpoint needs a higher one",
        f"weights.checkpoint.version 6 is not above 7: {RISES}",
        checkpoint(6, uri="s3://b/old"),
        before=checkpoint(7, uri="s3://b/new"),
    ),
    Rejection(
        FLEET,
        ".spec.weights.checkpoint.uri",
        NO_FILE,
        NO_FILE,
        checkpoint(1, uri="file:///m"),
    ),
    Rejection(
        FLEET,
        ".spec",
        "refit.minReady must not be above replicas",
        "refit.minReady 3 is above replicas 2; no refit could ever begin",
        {"replicas": 2, "refit": {"minReady": 3}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "refit.lateJoin Checkpoint needs weights.checkpoint",
        "refit.lateJoin Checkpoint needs weights.checkpoint",
        {"refit": {"lateJoin": "Checkpoint"}},
    ),
    Rejection(FLEET, ".spec", NO_ROLL, NO_ROLL, {"refit": {"lateJoin": "Wait", "strategy": "Rolling"}}),
    Rejection(
        SYNC,
        ".spec",
        "a WeightSync has either trainer or checkpoint",
        "a WeightSync has either trainer or checkpoint",
        {"checkpoint": {"version": 1}},
    ),
    Rejection(
        SYNC,
        ".spec.fleetRef.name",
        "fleetRef.name cannot change",
        "fleetRef.name cannot change from demo to other; make another WeightSync",
        {"fleetRef": {"name": "other"}},
        before={},
    ),
]

ACCEPTED: dict[str, tuple[str, Body]] = {
    "a fleet name of 40 characters": (FLEET, body(FLEET, {}, "a" * 40)),
    "Native with GPUs": (FLEET, body(FLEET, {"refit": {"transport": "Native"}})),
    "Gloo without GPUs": (
        FLEET,
        body(FLEET, {"refit": {"transport": "Gloo"}, "placement": {"gpuResource": ""}}),
    ),
    "a revision on the hub": (FLEET, body(FLEET, model(revision="main", source={"hub": {}}))),
    "a revision without source": (FLEET, body(FLEET, model(revision="main"))),
    "a folder without revision": (FLEET, body(FLEET, model(source={"hostPath": {"path": "/m"}}))),
    "a claim": (FLEET, body(FLEET, model(source={"persistentVolumeClaim": {"claimName": "c", "path": "a/b"}}))),
    "other resources than the GPUs": (
        FLEET,
        body(FLEET, {"engine": {"resources": {"limits": {"cpu": 2, "memory": "4Gi"}, "requests": {"cpu": "500m"}}}}),
    ),
    "a volume and its mount": (
        FLEET,
        body(
            FLEET,
            {
                "template": {
                    "volumes": [{"name": "data", "emptyDir": {"medium": "Memory"}}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            },
        ),
    ),
    "arguments that shadow nothing": (
        FLEET,
        body(FLEET, {"engine": {"args": {"enforce-eager": "", "hf-overrides.num_layers": "2"}}}),
    ),
    "environment of one's own": (
        FLEET,
        body(FLEET, {"engine": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}}),
    ),
    "labels and annotations of one's own": (
        FLEET,
        body(FLEET, {"template": {"labels": {"team": "rl"}, "annotations": {"example.com/note": "x"}}}),
    ),
    "a checkpoint at a URI": (
        FLEET,
        body(FLEET, checkpoint(1, uri="gs://b/k", secretRef={"name": "s"}) | {"refit": {"lateJoin": "Checkpoint"}}),
    ),
    "a checkpoint in a claim": (
        FLEET,
        body(FLEET, checkpoint(2147483647, persistentVolumeClaim={"claimName": "c", "path": "run/7"})),
    ),
    "a WeightSync": (SYNC, body(SYNC, {})),
}


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
