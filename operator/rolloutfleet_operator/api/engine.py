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
