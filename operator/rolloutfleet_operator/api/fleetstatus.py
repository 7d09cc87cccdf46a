"""What the operator reports about a fleet."""

from typing import Annotated

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, schema
from rolloutfleet_operator.api.conditions import Condition
from rolloutfleet_operator.api.history import MAX_LINES, Laggard
from rolloutfleet_operator.api.recovery import RecoveryStatus
from rolloutfleet_operator.api.weightsync import LastRefit

MAX_ENGINE_ENDPOINTS = 64
"""Engine addresses listed in status; a larger fleet lists its first ones and serves them all through the Service."""

Url = Annotated[str, Field(max_length=512)]


class Weights(ApiModel):
    """Which weights the fleet serves; epoch and version never fall."""

    epoch: int = Field(default=0, ge=0, description="epoch is the last membership of the refit group.")
    version: int = Field(
        default=0, ge=0, description="version is the committed weight version; 0 is what the engines loaded at start."
    )
    target: int = Field(
        default=0, ge=0, description="target is the version on its way, or version when no refit is under way."
    )
    skew: int = Field(
        default=0, ge=0, description="skew is the number of engines that do not hold the committed version."
    )
    stale: int = Field(
        default=0,
        ge=0,
        description="stale is how many of these serve an older version by leave, see spec.refit.strategy.",
    )
    asleep: int = Field(default=0, ge=0, description="asleep is the number of engines that a trainer has put to sleep.")
    behind: tuple[Laggard, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description=f"behind are engines that do not hold the committed version, the first {MAX_LINES} of them.",
        json_schema_extra=schema(list_type="atomic"),
    )
    last_refit: LastRefit | None = Field(default=None, description="lastRefit says how the last refit ended.")


class Endpoints(ApiModel):
    """Addresses inside the cluster."""

    generation: Url = Field(default="", description="generation is the address of every Ready engine at once.")
    sync: Url = Field(default="", description="sync is the address that trainers use.")
    engines: tuple[Url, ...] = Field(
        default=(),
        max_length=MAX_ENGINE_ENDPOINTS,
        description=f"engines are the addresses of the Ready engines by engine, at most {MAX_ENGINE_ENDPOINTS}.",
        json_schema_extra=schema(list_type="atomic"),
    )


class RolloutFleetStatus(ApiModel):
    """What the fleet is."""

    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=16,
        description="conditions are Ready, Reconciling, Stalled, PlacementSatisfied and WeightsCurrent.",
        json_schema_extra=schema(list_type="map", list_map_keys=["type"]),
    )
    observed_generation: int = Field(
        default=0, ge=0, description="observedGeneration is the generation that this status speaks of."
    )
    replicas: int = Field(default=0, ge=0, description="replicas is the number of engines that have a live pod.")
    ready_replicas: int = Field(default=0, ge=0, description="readyReplicas is the number of engines that serve.")
    updated_replicas: int = Field(
        default=0, ge=0, description="updatedReplicas is the number of engines of the current revision."
    )
    label_selector: str = Field(
        default="", max_length=1024, description="labelSelector selects the engines' leader pods, for autoscalers."
    )
    revision: str = Field(default="", max_length=63, description="revision is the current revision of engine pods.")
    weights: Weights | None = Field(default=None, description="weights say which weights the fleet serves.")
    recovery: RecoveryStatus | None = Field(
        default=None, description="recovery says what failed, and what is done about it."
    )
    endpoints: Endpoints | None = Field(default=None, description="endpoints are addresses inside the cluster.")
