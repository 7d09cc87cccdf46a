"""``spec.template``: what else engine pods carry."""

from typing import Annotated

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, Opaque, cel, schema
from rolloutfleet_operator.api.podparts import (
    LocalReference,
    Toleration,
    Volume,
    VolumeMount,
)
from rolloutfleet_operator.naming import RESERVED_KEY_PREFIXES

LabelValue = Annotated[str, Field(max_length=63)]


AnnotationValue = Annotated[str, Field(max_length=4096)]


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
    host_ipc: bool = Field(
        default=False,
        alias="hostIPC",
        description="hostIPC puts the engines into their node's IPC namespace and /dev/shm, so that a trainer there can show its "
        "memory to them (refit.transport Colocated). Whatever else runs in that namespace can reach it too, and the Pod "
        "Security Standards allow it in privileged namespaces alone.",
    )
    termination_grace_period_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description="terminationGracePeriodSeconds is how long an engine may take to end.",
    )
