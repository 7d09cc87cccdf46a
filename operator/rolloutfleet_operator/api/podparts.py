"""The parts of a pod that a fleet may set: a limited overlay, so that the CRD stays small and selectors stay ours."""

from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from rolloutfleet_operator.api.arguments import RESERVED_ENV, RESERVED_ENV_PREFIX
from rolloutfleet_operator.api.base import ApiModel, Opaque, Quantity, cel, schema
from rolloutfleet_operator.naming import VOLUME_PREFIX

RESERVED_MOUNTS = ("/models/model", "/var/run/rolloutfleet")


class EnvVar(ApiModel):
    """One environment variable of the engine."""

    name: str = Field(
        min_length=1,
        max_length=256,
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="name is the variable's name.",
        json_schema_extra=schema(
            validations=[
                cel(
                    f"!self.startsWith('{RESERVED_ENV_PREFIX}')",
                    f"names that begin with {RESERVED_ENV_PREFIX} belong to the operator",
                    expression=f"'engine.env: ' + self + ' begins with {RESERVED_ENV_PREFIX}, "
                    "which belongs to the operator; choose another name'",
                ),
                *(
                    cel(f"self != '{name}'", f"engine.env: {name} is not for users to set: {advice}")
                    for name, advice in RESERVED_ENV.items()
                ),
            ]
        ),
    )
    value: str | None = Field(default=None, max_length=32768, description="value is the variable's literal value.")
    value_from: Opaque | None = Field(
        default=None, description="valueFrom takes the value from a Secret, a ConfigMap or the pod itself, as in a pod."
    )


class Resources(ApiModel):
    """Compute resources of the engine container."""

    limits: dict[str, Quantity] = Field(
        default_factory=dict,
        description="limits are upper bounds by resource name; the GPU resource is added by the operator.",
        json_schema_extra=schema(max_properties=32),
    )
    requests: dict[str, Quantity] = Field(
        default_factory=dict,
        description="requests are guaranteed amounts by resource name.",
        json_schema_extra=schema(max_properties=32),
    )


class Toleration(ApiModel):
    """A taint that engine pods tolerate."""

    key: str | None = Field(default=None, max_length=316, description="key is the taint's key; empty matches all.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="operator is how key and value are compared, Equal unless set."
    )
    value: str | None = Field(default=None, max_length=63, description="value is the taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="effect is the taint's effect; empty matches all."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, description="tolerationSeconds bounds the time on a node with a NoExecute taint."
    )


class LocalReference(ApiModel):
    """An object of the fleet's namespace."""

    name: str = Field(min_length=1, max_length=253, description="name is the object's name.")


class Volume(ApiModel):
    """A volume of the engine pod, as in a pod."""

    model_config = ConfigDict(frozen=True, extra="allow", alias_generator=to_camel, populate_by_name=True)

    name: str = Field(
        min_length=1,
        max_length=63,
        description="name is the volume's name.",
        json_schema_extra=schema(
            validations=[
                cel(
                    f"!self.startsWith('{VOLUME_PREFIX}')",
                    f"volume names that begin with {VOLUME_PREFIX} belong to the operator",
                    expression=f"'template.volumes: ' + self + ' begins with {VOLUME_PREFIX}, "
                    "which belongs to the operator; choose another name'",
                )
            ]
        ),
    )


class VolumeMount(ApiModel):
    """Where the engine container sees a volume."""

    name: str = Field(min_length=1, max_length=63, description="name is the volume's name.")
    mount_path: str = Field(
        min_length=1,
        max_length=1024,
        pattern="^/[^:]*$",
        description="mountPath is the absolute path in the container; /dev/shm and /tmp replace the operator's own.",
        json_schema_extra=schema(
            validations=[
                cel(
                    f"!(self in [{', '.join(repr(path) for path in RESERVED_MOUNTS)}])",
                    f"{' and '.join(RESERVED_MOUNTS)} belong to the operator",
                    expression="'template.volumeMounts: ' + self + ' belongs to the operator; mount elsewhere'",
                )
            ]
        ),
    )
    sub_path: str | None = Field(default=None, max_length=1024, description="subPath is the path inside the volume.")
    read_only: bool | None = Field(default=None, description="readOnly mounts the volume for reading alone.")
