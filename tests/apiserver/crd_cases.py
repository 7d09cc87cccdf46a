"""For every rule that the CRDs carry an object that breaks it alone, with the API server's words, and objects that break none."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from apiserver.harness.api import Body
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
        f"engine.resources.{where} holds example.com/gpu, which parallelism counts already; remove it from the {where}",
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
        FLEET,
        ".spec",
        "parallelism.expert must be 1 or a multiple of parallelism.tensor",
        "parallelism.expert is 6, which is no multiple of parallelism.tensor 4: the experts of an engine are spread over data x "
        "tensor ranks",
        {"parallelism": {"tensor": 4, "expert": 6}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "parallelism.gpusPerNode must divide parallelism.tensor, or be a multiple of it",
        "parallelism.gpusPerNode is 8, but a tensor parallel group has 3 GPUs, and neither divides the other: nodes would hold uneven "
        "parts of it; set gpusPerNode to a divisor or a multiple of 3",
        {"parallelism": {"tensor": 3, "pipeline": 8, "gpusPerNode": 8}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "parallelism.gpusPerNode must divide tensor x pipeline, or be a multiple of it",
        "parallelism.gpusPerNode is 4, but a model replica (tensor x pipeline) has 6 GPUs, and neither divides the other: nodes would "
        "hold uneven parts of it; set gpusPerNode to a divisor or a multiple of 6",
        {"parallelism": {"tensor": 2, "pipeline": 3, "expert": 4, "gpusPerNode": 4}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "parallelism.gpusPerNode must divide the GPUs of an engine",
        "parallelism.gpusPerNode is 4, which does not divide the 6 GPUs of an engine: its last node would hold fewer than the others",
        {"parallelism": {"tensor": 2, "expert": 6, "gpusPerNode": 4}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "engine.lora needs engines of one pod",
        "engine.lora needs engines of one pod, since vLLM reads adapters from a folder of its pod; an engine has 16 GPUs and "
        "gpusPerNode is 8",
        {"parallelism": {"tensor": 16, "gpusPerNode": 8}, "engine": {"lora": {}}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "fabric.preset needs GPUs, and placement.gpuResource is empty",
        "fabric.preset is EFA but placement.gpuResource is empty; set it to None, or name the GPUs",
        {"fabric": {"preset": "EFA"}, "placement": {"gpuResource": ""}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "fabric.preset needs fabric.rdmaResource",
        "fabric.preset RoCE needs fabric.rdmaResource: the extended resource by which nodes offer RDMA devices, such as "
        "rdma/rdma_shared_device_a",
        {"fabric": {"preset": "RoCE"}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "fabric.rdmaResource needs a preset that uses it",
        "fabric.rdmaResource is rdma/ib but fabric.preset is None, which uses no RDMA devices; set it to InfiniBand, RoCE or EFA, or "
        "remove the resource",
        {"fabric": {"rdmaResource": "rdma/ib"}},
    ),
    Rejection(
        FLEET,
        ".spec",
        "fabric.claimTemplate needs fabric.preset MultiNodeNVLink",
        "fabric.claimTemplate is imex but fabric.preset is None; set it to MultiNodeNVLink, or remove the template",
        {"fabric": {"claimTemplate": "imex"}},
    ),
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
    "an engine over two nodes": (
        FLEET,
        body(FLEET, {"parallelism": {"tensor": 8, "pipeline": 2, "gpusPerNode": 8}}),
    ),
    "experts over data parallel ranks": (
        FLEET,
        body(FLEET, {"parallelism": {"tensor": 2, "expert": 16, "gpusPerNode": 8}}),
    ),
    "adapters over InfiniBand": (
        FLEET,
        body(FLEET, {"fabric": {"preset": "InfiniBand", "rdmaResource": "rdma/ib", "sharedMemory": "64Gi"}}),
    ),
    "EFA with its own resource": (FLEET, body(FLEET, {"fabric": {"preset": "EFA", "hostNetwork": True}})),
    "a channel of a domain of one's own": (
        FLEET,
        body(FLEET, {"fabric": {"preset": "MultiNodeNVLink", "claimTemplate": "imex"}}),
    ),
    "a WeightSync": (SYNC, body(SYNC, {})),
}
