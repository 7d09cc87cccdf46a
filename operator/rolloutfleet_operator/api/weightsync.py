"""``WeightSync``: one run of a fleet's sync job, and what it reports."""

from pydantic import Field

from rolloutfleet.contract.trainer import Phase
from rolloutfleet_operator.api.base import ApiModel, LongText, ShortText, cel, schema
from rolloutfleet_operator.api.conditions import Condition


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


class Floor(ApiModel):
    """What epoch and version start from."""

    epoch: int = Field(default=0, ge=0, description="epoch is the last epoch of the fleet; the next one is higher.")
    version: int = Field(default=0, ge=0, description="version is the weight version that the fleet has committed.")


class WeightSyncSpec(ApiModel):
    """Which fleet is refitted, and by whom."""

    fleet_ref: FleetReference = Field(description="fleetRef is the fleet that is refitted.")
    trainer: TrainerSource = Field(description="trainer lets trainers open sessions and send weights.")
    floor: Floor = Field(
        default_factory=Floor, description="floor is set by the operator, so that epoch and version never fall."
    )


class Intent(ApiModel):
    """A refit that has been decided: written before the first engine pauses, cleared by the commit."""

    epoch: int = Field(ge=0, description="epoch is the group's epoch.")
    version: int = Field(ge=0, description="version is the weight version on its way.")


class MemberCounts(ApiModel):
    """How many engines hold the committed version."""

    total: int = Field(default=0, ge=0, description="total is the number of engines that the fleet should have.")
    admitted: int = Field(
        default=0, ge=0, description="admitted is the number of engines that hold the committed version."
    )
    asleep: int = Field(default=0, ge=0, description="asleep is the number of engines that sleep.")


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
    members: MemberCounts | None = Field(default=None, description="members counts the engines.")
    session: Session | None = Field(default=None, description="session is the trainer's, while there is one.")
    last_refit: LastRefit | None = Field(default=None, description="lastRefit says how the last refit ended.")
