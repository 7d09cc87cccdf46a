"""``spec.engine`` and ``spec.parallelism``: how vLLM runs."""

from typing import Annotated

from pydantic import Field

from rolloutfleet_operator.api.arguments import (
    ARGUMENT_PATTERN,
    ARGUMENT_RULE,
    SHADOWED,
)
from rolloutfleet_operator.api.base import ApiModel, cel, schema
from rolloutfleet_operator.api.podparts import (
    EnvVar,
    Resources,
)

ArgumentValue = Annotated[str, Field(max_length=4096)]


ModuleName = Annotated[str, Field(max_length=128, pattern="^[A-Za-z0-9_.]+$")]


class ParallelismSpec(ApiModel):
    """How one engine is spread over devices, and over pods where one node has too few of them.

    Ranks are numbered with tensor fastest, then pipeline, then data, and a pod holds consecutive ones.
    """

    tensor: int = Field(
        default=1,
        ge=1,
        le=64,
        description="tensor is the tensor parallel size: over how many worker processes, and GPUs, each layer is spread.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=64,
        description="pipeline is the pipeline parallel size: into how many stages layers are cut.",
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="expert is the expert parallel size, a multiple of tensor: over how many worker processes the experts of each "
        "layer are spread, data parallel ranks inside the engine included, of which there are expert / tensor.",
    )
    gpus_per_node: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="gpusPerNode is how many worker processes, and GPUs, of an engine one node holds; an engine of more has several "
        "pods, one on each of its nodes. An engine is one pod unless this is set.",
    )

    @property
    def data(self) -> int:
        """Data parallel ranks inside one engine."""
        return max(1, self.expert // self.tensor)

    @property
    def world(self) -> int:
        """Worker processes, and GPUs, of one engine."""
        return self.data * self.pipeline * self.tensor

    @property
    def ranks_per_pod(self) -> int:
        """Worker processes in each of an engine's pods."""
        return min(self.gpus_per_node or self.world, self.world)

    @property
    def pods(self) -> int:
        """Pods of one engine, its leader among them."""
        return self.world // self.ranks_per_pod


_DATA = "(self.parallelism.expert > self.parallelism.tensor ? self.parallelism.expert / self.parallelism.tensor : 1)"
_REPLICA = "self.parallelism.tensor * self.parallelism.pipeline"
_WORLD = f"{_REPLICA} * {_DATA}"
_NODE = "self.parallelism.gpusPerNode"


def _divides(what: str, size: str, words: str) -> dict[str, str]:
    """The rule that ranks which belong together take whole nodes, or share one with as many others as fit."""
    return cel(
        f"!has({_NODE}) || {_NODE} >= {_WORLD} || {size} % {_NODE} == 0 || {_NODE} % ({size}) == 0",
        f"parallelism.gpusPerNode must divide {what}, or be a multiple of it",
        expression=f"'parallelism.gpusPerNode is %d, but {words} %d GPUs, and neither divides the other: nodes would hold uneven parts of "
        f"it; set gpusPerNode to a divisor or a multiple of %d'.format([{_NODE}, {size}, {size}])",
    )


PARALLELISM_VALIDATIONS = [
    cel(
        "self.parallelism.expert == 1 || self.parallelism.expert % self.parallelism.tensor == 0",
        "parallelism.expert must be 1 or a multiple of parallelism.tensor",
        expression="'parallelism.expert is %d, which is no multiple of parallelism.tensor %d: the experts of an engine are spread over "
        "data x tensor ranks'.format([self.parallelism.expert, self.parallelism.tensor])",
    ),
    _divides("parallelism.tensor", "self.parallelism.tensor", "a tensor parallel group has"),
    _divides("tensor x pipeline", _REPLICA, "a model replica (tensor x pipeline) has"),
    cel(
        f"!has({_NODE}) || {_NODE} >= {_WORLD} || ({_WORLD}) % {_NODE} == 0",
        "parallelism.gpusPerNode must divide the GPUs of an engine",
        expression=f"'parallelism.gpusPerNode is %d, which does not divide the %d GPUs of an engine: its last node would hold fewer than "
        f"the others'.format([{_NODE}, {_WORLD}])",
    ),
    cel(
        f"!has(self.engine.lora) || !has({_NODE}) || {_NODE} >= {_WORLD}",
        "engine.lora needs engines of one pod",
        expression=f"'engine.lora needs engines of one pod, since vLLM reads adapters from a folder of its pod; an engine has %d GPUs and "
        f"gpusPerNode is %d'.format([{_WORLD}, {_NODE}])",
    ),
]
"""Rules of the spec for sizes that do not fit together."""


def parallelism_faults(sizes: ParallelismSpec) -> list[str]:
    """What the schema's rules say, for objects that were stored without them."""
    faults = []
    if sizes.expert > 1 and sizes.expert % sizes.tensor:
        faults.append(
            f"parallelism.expert is {sizes.expert}, which is no multiple of parallelism.tensor {sizes.tensor}"
        )
    node = sizes.gpus_per_node
    if node is None or node >= sizes.world:
        return faults
    for words, size in (
        ("a tensor parallel group", sizes.tensor),
        ("a model replica (tensor x pipeline)", sizes.tensor * sizes.pipeline),
    ):
        if size % node and node % size:
            faults.append(
                f"parallelism.gpusPerNode is {node}, but {words} has {size} GPUs, and neither divides the other"
            )
    if sizes.world % node:
        faults.append(f"parallelism.gpusPerNode is {node}, which does not divide the {sizes.world} GPUs of an engine")
    return faults


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
