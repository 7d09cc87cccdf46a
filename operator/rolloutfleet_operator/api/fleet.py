"""``RolloutFleet``: what a user asks of a fleet."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from rolloutfleet.contract.policy import CachePolicy, PauseMode, RefitDeadlines, RefitPolicy, Staging, Transport
from rolloutfleet_operator.api.arguments import (
    ARGUMENT_PATTERN,
    ARGUMENT_RULE,
    SHADOWED,
    argument_faults,
    environment_faults,
)
from rolloutfleet_operator.api.base import ApiModel, Opaque, cel, schema
from rolloutfleet_operator.api.podparts import (
    EnvVar,
    LocalReference,
    Resources,
    Toleration,
    Volume,
    VolumeMount,
)
from rolloutfleet_operator.naming import RESERVED_KEY_PREFIXES

LabelValue = Annotated[str, Field(max_length=63)]
AnnotationValue = Annotated[str, Field(max_length=4096)]
ArgumentValue = Annotated[str, Field(max_length=4096)]
ModuleName = Annotated[str, Field(max_length=128, pattern="^[A-Za-z0-9_.]+$")]


class LoadFormat(StrEnum):
    """What the engines hold before the first refit."""

    AUTO = "Auto"
    """The model's own weights: version 0 serves."""
    DUMMY = "Dummy"
    """Random weights: nothing serves before the first refit."""


class Dtype(StrEnum):
    """Number format of the engines' weights."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class HubSource(ApiModel):
    """The model hub that vLLM downloads from."""


class ClaimSource(ApiModel):
    """A volume claim that holds the model."""

    claim_name: str = Field(min_length=1, max_length=253, description="claimName is the PersistentVolumeClaim's name.")
    path: str | None = Field(
        default=None,
        max_length=1024,
        pattern="^[^/].*$",
        description="path is the model's folder inside the volume, relative to its root; the root itself unless set.",
    )


class HostPathSource(ApiModel):
    """A folder of every node that holds the model."""

    path: str = Field(
        max_length=1024, pattern="^/.*$", description="path is the absolute path of the model's folder on the nodes."
    )


class ModelSource(ApiModel):
    """Where the model's files come from: exactly one of the fields."""

    hub: HubSource | None = Field(default=None, description="hub downloads the model by its name.")
    persistent_volume_claim: ClaimSource | None = Field(
        default=None, description="persistentVolumeClaim reads the model from a claim of the fleet's namespace."
    )
    host_path: HostPathSource | None = Field(
        default=None, description="hostPath reads the model from a folder that every node has."
    )

    @property
    def local(self) -> bool:
        """Whether the model's files are mounted into the pod."""
        return self.persistent_volume_claim is not None or self.host_path is not None


_SOURCES = ("hub", "persistentVolumeClaim", "hostPath")
_ONE_SOURCE = " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in _SOURCES)
_NAMED_SOURCES = " + ".join(f"(has(self.{name}) ? ' {name}' : '')" for name in _SOURCES)


class ModelSpec(ApiModel):
    """The model that the engines serve."""

    name: str = Field(
        min_length=1,
        max_length=256,
        description="name is the model's name: its id on the hub, and what it is served as unless servedName is set. "
        "It cannot change.",
        json_schema_extra=schema(
            validations=[
                cel(
                    "self == oldSelf",
                    "model.name cannot change",
                    expression="'model.name cannot change from ' + oldSelf + ' to ' + self + '; make a new fleet for another model'",
                )
            ]
        ),
    )
    revision: str | None = Field(
        default=None, min_length=1, max_length=256, description="revision is the branch, tag or commit on the hub."
    )
    source: ModelSource | None = Field(
        default=None,
        description="source says where the model's files come from: exactly one of hub, persistentVolumeClaim and "
        "hostPath; the hub unless set.",
        json_schema_extra=schema(
            validations=[
                cel(
                    f"{_ONE_SOURCE} == 1",
                    "model.source needs exactly one of hub, persistentVolumeClaim and hostPath",
                    expression=f"'model.source needs exactly one of hub, persistentVolumeClaim and hostPath; given:' + {_NAMED_SOURCES}",
                )
            ]
        ),
    )
    load_format: LoadFormat = Field(
        default=LoadFormat.AUTO,
        description="loadFormat is Auto to load the model's weights, or Dummy to start with random ones and serve after the first refit.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="servedName is the model's name in requests, name unless set.",
    )
    max_model_length: int | None = Field(
        default=None,
        ge=1,
        le=2147483647,
        description="maxModelLength bounds prompt and output of a request, in tokens.",
    )
    dtype: Dtype = Field(default=Dtype.AUTO, description="dtype is the number format of the engines' weights.")


class ParallelismSpec(ApiModel):
    """How one engine is spread over devices."""

    tensor: int = Field(
        default=1,
        ge=1,
        le=64,
        description="tensor is the tensor parallel size: worker processes, and GPUs, of one engine.",
    )


class LoraSpec(ApiModel):
    """Adapters that trainers may give to the engines beside the model's own weights."""

    max_rank: int = Field(
        default=16,
        ge=1,
        le=512,
        description="maxRank is the highest rank of an adapter; engines have room for the next rank that vLLM knows: "
        "1, 8, 16, 32, 64, 128, 256, 320 or 512.",
    )
    max_adapters: int = Field(
        default=1,
        ge=1,
        le=64,
        description="maxAdapters is how many adapters are served at once. Each takes two of vLLM's slots, so that requests end with the "
        "version that they began with while later ones take the next; adapters beyond that take turns.",
    )
    target_modules: tuple[ModuleName, ...] = Field(
        default=(),
        max_length=64,
        description="targetModules are the modules that adapters may change, such as q_proj; all that vLLM knows unless set.",
        json_schema_extra=schema(list_type="set"),
    )


class EngineSpec(ApiModel):
    """How vLLM runs in each engine pod."""

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="image is the engine's image, the operator's default unless set.",
    )
    args: dict[str, ArgumentValue] = Field(
        default_factory=dict,
        description="args are further arguments of vllm serve: name without dashes to value, empty for a bare flag.",
        json_schema_extra=schema(
            max_properties=64,
            validations=[
                cel(
                    f"self.all(key, key.matches('{ARGUMENT_PATTERN}'))",
                    f"engine.args: {ARGUMENT_RULE}",
                ),
                *(
                    cel(
                        f"!self.exists(key, key == '{name}' || key.startsWith('{name}.'))",
                        f"engine.args.{name} is not for users to set: {advice}",
                    )
                    for name, advice in SHADOWED.items()
                ),
            ],
        ),
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        description="env are further environment variables of the engine.",
        json_schema_extra=schema(list_type="map", list_map_keys=["name"]),
    )
    lora: LoraSpec | None = Field(
        default=None, description="lora lets trainers give adapters to the engines; none are taken unless set."
    )
    resources: Resources = Field(
        default_factory=Resources, description="resources are the engine container's compute resources besides GPUs."
    )


class PlacementSpec(ApiModel):
    """What engines need of a node."""

    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        max_length=316,
        description="gpuResource is the extended resource that counts GPUs; empty runs the engines on CPUs.",
    )


def _reserved_keys(field: str) -> dict[str, str]:
    condition = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_KEY_PREFIXES)
    return cel(
        f"!self.exists(key, {condition})",
        f"template.{field}: keys that begin with {' or '.join(RESERVED_KEY_PREFIXES)} belong to the operator",
    )


class TemplateSpec(ApiModel):
    """What else engine pods carry."""

    labels: dict[str, LabelValue] = Field(
        default_factory=dict,
        description="labels are further labels of engine pods.",
        json_schema_extra=schema(max_properties=64, validations=[_reserved_keys("labels")]),
    )
    annotations: dict[str, AnnotationValue] = Field(
        default_factory=dict,
        description="annotations are further annotations of engine pods.",
        json_schema_extra=schema(max_properties=64, validations=[_reserved_keys("annotations")]),
    )
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        description="nodeSelector are labels that a node must carry.",
        json_schema_extra=schema(max_properties=64),
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        max_length=64,
        description="tolerations are the taints that engine pods tolerate.",
        json_schema_extra=schema(list_type="atomic"),
    )
    affinity: Opaque | None = Field(default=None, description="affinity is the pods' affinity, as in a pod.")
    priority_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, description="priorityClassName is the pods' priority class."
    )
    service_account_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="serviceAccountName is the pods' service account; its token is not mounted.",
    )
    runtime_class_name: str | None = Field(
        default=None, min_length=1, max_length=253, description="runtimeClassName is the pods' runtime class."
    )
    image_pull_secrets: tuple[LocalReference, ...] = Field(
        default=(),
        max_length=16,
        description="imagePullSecrets are Secrets for pulling images, used for the sync pod too.",
        json_schema_extra=schema(list_type="map", list_map_keys=["name"]),
    )
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=64,
        description="volumes are further volumes, as in a pod.",
        json_schema_extra=schema(list_type="map", list_map_keys=["name"]),
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        max_length=64,
        description="volumeMounts say where the engine container sees the volumes.",
        json_schema_extra=schema(list_type="map", list_map_keys=["mountPath"]),
    )
    termination_grace_period_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description="terminationGracePeriodSeconds is how long an engine may take to end.",
    )


class RefitSpec(ApiModel):
    """How new weights reach the engines."""

    transport: Transport = Field(
        default=Transport.AUTO,
        description="transport is how weights travel: Colocated copies them out of the trainer's memory on the same device, "
        "Layout sends each rank its own slices, Native (GPUs) and Gloo (CPUs) broadcast whole tensors to vLLM's loader; "
        "Auto is the first of these that trainer and engines can all do, and status says which and why.",
    )
    staging: Staging = Field(
        default=Staging.AUTO,
        description="staging is Auto to receive weights beside the live ones while the engines serve, wherever every rank has "
        "room for a second copy, or Never to receive them in place while the engines are paused.",
    )
    pause: PauseMode = Field(
        default=PauseMode.KEEP,
        description="pause says what becomes of requests in flight: Keep freezes them, Wait lets them finish, Abort ends them.",
    )
    cache: CachePolicy = Field(
        default=CachePolicy.RESET,
        description="cache says what becomes of the prefix cache that the old weights filled.",
    )
    deadlines: RefitDeadlines = Field(
        default_factory=RefitDeadlines, description="deadlines bound each phase of a refit, in seconds."
    )


class RolloutFleetSpec(ApiModel):
    """What the fleet should be."""

    replicas: int = Field(default=1, ge=0, le=1000, description="replicas is the number of engines.")
    model: ModelSpec = Field(description="model is what the engines serve.")
    parallelism: ParallelismSpec = Field(
        default_factory=ParallelismSpec, description="parallelism says how one engine is spread over devices."
    )
    engine: EngineSpec = Field(default_factory=EngineSpec, description="engine says how vLLM runs in each pod.")
    placement: PlacementSpec = Field(
        default_factory=PlacementSpec, description="placement says what engines need of a node."
    )
    template: TemplateSpec = Field(default_factory=TemplateSpec, description="template is what else engine pods carry.")
    refit: RefitSpec = Field(default_factory=RefitSpec, description="refit says how new weights reach the engines.")
    suspend: bool = Field(
        default=False,
        description="suspend removes the engines and the sync job; versions, Services and the token stay.",
    )

    @model_validator(mode="after")
    def _nothing_that_is_not_for_users(self) -> Self:
        faults = argument_faults(self.engine.args) + environment_faults(each.name for each in self.engine.env)
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def engines(self) -> int:
        """Engines that should exist now."""
        return 0 if self.suspend else self.replicas

    @property
    def world_size(self) -> int:
        """Ranks of the whole fleet, the trainer not counted: a multiple of the tensor parallel size by construction."""
        return self.replicas * self.parallelism.tensor

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.model.served_name or self.model.name

    @property
    def refit_policy(self) -> RefitPolicy:
        """The policy as the sync job receives it."""
        return RefitPolicy(
            transport=self.refit.transport,
            staging=self.refit.staging,
            pause=self.refit.pause,
            cache=self.refit.cache,
            deadlines=self.refit.deadlines,
        )


FLEET_VALIDATIONS = [
    cel(
        "self.metadata.name.size() <= 40",
        "metadata.name has at most 40 characters, so that names of pods stay valid",
        expression="'metadata.name ' + self.metadata.name + ' is longer than 40 characters, and names of pods hold it'",
    ),
    cel(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name begins with a letter and holds lower-case letters, digits and dashes alone, since Services are named after it",
    ),
]
"""Rules on the whole object."""


def _gpu_counted_once(field: str) -> dict[str, str]:
    amounts, resource = f"self.engine.resources.{field}", "self.placement.gpuResource"
    return cel(
        f"{resource} == '' || !has({amounts}) || !({resource} in {amounts})",
        f"engine.resources.{field} must not hold placement.gpuResource",
        expression=f"'engine.resources.{field} holds ' + {resource} + "
        f"', which parallelism.tensor counts already; remove it from the {field}'",
    )


SPEC_VALIDATIONS = [
    cel(
        "self.refit.transport != 'Native' || self.placement.gpuResource != ''",
        "refit.transport Native needs GPUs, and placement.gpuResource is empty: set Auto or Gloo, or name the GPU resource",
    ),
    cel(
        "self.refit.transport != 'Gloo' || self.placement.gpuResource == ''",
        "refit.transport Gloo is for engines on CPUs, and placement.gpuResource names GPUs: set Auto or Native, or empty it",
    ),
    cel(
        "!has(self.model.revision) || !has(self.model.source) || has(self.model.source.hub)",
        "model.revision needs model.source.hub",
        expression="'model.revision is ' + self.model.revision + ' but model.source is not the hub; remove one of them'",
    ),
    _gpu_counted_once("limits"),
    _gpu_counted_once("requests"),
    cel(
        "!has(self.template.volumeMounts) || self.template.volumeMounts.all(mount, has(self.template.volumes) "
        "&& self.template.volumes.exists(volume, volume.name == mount.name))",
        "template.volumeMounts names a volume that template.volumes does not hold",
    ),
]
"""Rules across fields of the spec."""
