"""``WeightSync``: one run of a fleet's sync job, and what it reports."""

from typing import Final

from pydantic import Field

from rolloutfleet.contract.trainer import Phase
from rolloutfleet_operator.api.base import ApiModel, LongText, ShortText, cel, schema
from rolloutfleet_operator.api.conditions import Condition
from rolloutfleet_operator.api.history import (
    MAX_LINES,
    MAX_REFITS,
    AttemptSummary,
    Laggard,
    LedgerGap,
    Progress,
    RefitSummary,
)


class FleetReference(ApiModel):
    """The fleet that is refitted."""

    name: str = Field(
        min_length=1,
        max_length=40,
        description="name is the fleet's name, in the same namespace. It cannot change.",
        json_schema_extra=schema(
            validations=[
                cel(
                    "self == oldSelf",
                    "fleetRef.name cannot change",
                    expression="'fleetRef.name cannot change from ' + oldSelf + ' to ' + self + '; make another WeightSync'",
                )
            ]
        ),
    )


class TrainerSource(ApiModel):
    """Trainers that come and go."""


class CheckpointRefit(ApiModel):
    """One version out of a checkpoint."""

    version: int = Field(ge=1, description="version is the weight version that the checkpoint becomes.")
    place: str = Field(default="", max_length=1536, description="place is where the checkpoint is, in words.")


class Floor(ApiModel):
    """What epoch and version start from."""

    epoch: int = Field(default=0, ge=0, description="epoch is the last epoch of the fleet; the next one is higher.")
    version: int = Field(default=0, ge=0, description="version is the weight version that the fleet has committed.")


class WeightSyncSpec(ApiModel):
    """Which fleet is refitted, and by whom."""

    fleet_ref: FleetReference = Field(description="fleetRef is the fleet that is refitted.")
    trainer: TrainerSource | None = Field(
        default=None, description="trainer lets trainers open sessions and send weights."
    )
    checkpoint: CheckpointRefit | None = Field(
        default=None,
        description="checkpoint is one version that a Job sends out of a checkpoint. The operator makes these objects from "
        "weights.checkpoint of a fleet; one that anybody else makes does nothing.",
    )
    floor: Floor = Field(
        default_factory=Floor, description="floor is set by the operator, so that epoch and version never fall."
    )


class Intent(ApiModel):
    """A refit that has been decided: written before the first engine pauses, cleared by the commit."""

    epoch: int = Field(ge=0, description="epoch is the group's epoch.")
    version: int = Field(ge=0, description="version is the weight version on its way.")
    attempt: int = Field(
        default=1, ge=1, description="attempt counts how often it set out, with fewer engines each time."
    )
    repair: bool = Field(
        default=False, description="repair says that it is the committed version, on its way to engines that lack it."
    )


MAX_VERSIONS: Final = 8


class VersionCount(ApiModel):
    """Engines that serve one version."""

    version: int = Field(ge=0, description="version is what they serve.")
    engines: int = Field(ge=1, description="engines is how many of them there are.")


class MemberCounts(ApiModel):
    """How many engines hold the committed version."""

    total: int = Field(default=0, ge=0, description="total is the number of engines that the fleet should have.")
    admitted: int = Field(
        default=0, ge=0, description="admitted is the number of engines that hold the committed version."
    )
    asleep: int = Field(default=0, ge=0, description="asleep is the number of engines that sleep.")
    stale: int = Field(
        default=0,
        ge=0,
        description="stale is the number of engines that serve an older version and may do so for a while, see spec.refit.strategy of the "
        "fleet.",
    )
    oldest_version: int | None = Field(
        default=None, ge=0, description="oldestVersion is the oldest one that is served, while more than one is."
    )
    versions: tuple[VersionCount, ...] = Field(
        default=(),
        max_length=MAX_VERSIONS,
        description="versions count the engines by the version that they serve, the newest first, while more than one is served.",
        json_schema_extra=schema(list_type="atomic"),
    )


class Session(ApiModel):
    """The trainer that holds the sync job."""

    id: ShortText = Field(default="", description="id is the session's id.")
    trainer: ShortText = Field(default="", description="trainer is the name that the trainer gave itself.")
    opened_at: ShortText | None = Field(default=None, description="openedAt is when the session began, in RFC 3339.")
    world_size: int | None = Field(default=None, ge=0, description="worldSize counts the workers and the trainer.")


class LastRefit(ApiModel):
    """How the last refit ended."""

    version: int = Field(default=0, ge=0, description="version is the weight version that was sent.")
    epoch: int = Field(default=0, ge=0, description="epoch is the group's epoch.")
    outcome: ShortText = Field(default="", description="outcome is Complete or Failed.")
    phase: ShortText = Field(default="", description="phase is where a failed refit stood.")
    member: ShortText = Field(default="", description="member is the pod to blame, when there is one.")
    code: ShortText = Field(default="", description="code is the failure's stable name.")
    message: LongText = Field(default="", description="message says why a refit failed.")
    finished_at: ShortText | None = Field(default=None, description="finishedAt is when it ended, in RFC 3339.")
    members: int = Field(default=0, ge=0, description="members is the number of engines that took part.")
    tensors: int = Field(default=0, ge=0, description="tensors is the number of tensors sent.")
    nbytes: int = Field(default=0, ge=0, description="nbytes is the number of bytes sent.")
    digest: ShortText = Field(default="", description="digest is the digest of the bytes sent.")
    live_digest: ShortText = Field(default="", description="liveDigest is the digest of an engine's parameters.")
    seconds: dict[str, float] = Field(
        default_factory=dict,
        description="seconds are the wall seconds of each phase.",
        json_schema_extra=schema(max_properties=32),
    )
    pause_seconds: float = Field(
        default=0,
        ge=0,
        description="pauseSeconds is the time from the first pause to the last engine resumed; for a staged version that was "
        "swapped in between two steps, the longest that any engine stood still.",
    )
    gigabytes_per_second: float = Field(default=0, ge=0, description="gigabytesPerSecond is the speed of the transfer.")
    transport: ShortText = Field(
        default="", description="transport is the one that was taken: Layout, Colocated, Native or Gloo."
    )
    reason: LongText = Field(default="", description="reason says why this transport, and why nothing was staged.")
    staged: bool = Field(
        default=False,
        description="staged says that the weights arrived beside the live ones, while the engines served.",
    )
    detours: tuple[LongText, ...] = Field(
        default=(),
        max_length=8,
        description="detours say what went through vLLM's loader instead of straight into place, and why.",
        json_schema_extra=schema(list_type="atomic"),
    )
    slowest: ShortText = Field(default="", description="slowest is the pod and local rank that had the version last.")
    slowest_lag_seconds: float = Field(
        default=0,
        ge=0,
        description="slowestLagSeconds is how much later the slowest engine had the version than the one in the middle.",
    )
    attempts: tuple[AttemptSummary, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description=f"attempts are those that lost a member before this outcome, the first {MAX_LINES} of them.",
        json_schema_extra=schema(list_type="atomic"),
    )


class CheckpointRun(ApiModel):
    """How the Job of a checkpoint fares."""

    job: ShortText = Field(default="", description="job is the Job's name.")
    revision: ShortText = Field(default="", description="revision changes with anything in the Job.")
    outcome: ShortText = Field(
        default="", description="outcome is Waiting, Running, Complete or Failed; a Job that Failed is not tried again."
    )
    message: LongText = Field(default="", description="message says what it waits for, does, or why it failed.")


class WeightSyncStatus(ApiModel):
    """What the sync job reports; the condition Active is the operator's."""

    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=16,
        description="conditions are Active, set by the operator, and Ready, set by the sync job.",
        json_schema_extra=schema(list_type="map", list_map_keys=["type"]),
    )
    phase: Phase | None = Field(default=None, description="phase is where the sync job stands.")
    epoch: int = Field(default=0, ge=0, description="epoch is the last epoch used.")
    version: int = Field(default=0, ge=0, description="version is the committed weight version.")
    intent: Intent | None = Field(default=None, description="intent is the refit under way.")
    held: LongText = Field(
        default="",
        description="held says why whole engines refuse requests since a refit failed (refit.onFailure Hold).",
    )
    members: MemberCounts | None = Field(default=None, description="members counts the engines.")
    session: Session | None = Field(default=None, description="session is the trainer's, while there is one.")
    refit: Progress | None = Field(default=None, description="refit is the refit under way.")
    gaps: tuple[LedgerGap, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description="gaps say why a group that forms is not whole, and which variables differ between engines; "
        f"the first {MAX_LINES} of them.",
        json_schema_extra=schema(list_type="atomic"),
    )
    behind: tuple[Laggard, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description=f"behind are engines that do not hold the committed version, the first {MAX_LINES} of them.",
        json_schema_extra=schema(list_type="atomic"),
    )
    checkpoint: CheckpointRun | None = Field(
        default=None, description="checkpoint says how the Job that sends spec.checkpoint fares."
    )
    repair: CheckpointRun | None = Field(
        default=None, description="repair says how the Job fares that sends it again, to engines that lack it."
    )
    last_refit: LastRefit | None = Field(default=None, description="lastRefit says how the last refit ended.")
    refits: tuple[RefitSummary, ...] = Field(
        default=(),
        max_length=MAX_REFITS,
        description=f"refits are those that have ended, the newest last, at most {MAX_REFITS}.",
        json_schema_extra=schema(list_type="atomic"),
    )


WEIGHTSYNC_VALIDATIONS: Final = [
    cel("has(self.trainer) != has(self.checkpoint)", "a WeightSync has either trainer or checkpoint"),
]
"""Rules across fields of the spec."""
