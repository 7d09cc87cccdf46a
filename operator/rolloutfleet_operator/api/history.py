"""What a WeightSync's status tells of refits, those that have ended and the one under way, and of engines that lag behind."""

from typing import Annotated

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel, ShortText, schema

MAX_REFITS = 20
"""Refits that a status remembers."""
MAX_LINES = 16
"""Gaps, laggards, attempts and names that a status lists; counts beside them tell of all."""

BriefText = Annotated[str, Field(max_length=320)]


class AttemptSummary(ApiModel):
    """An attempt that lost a member, after which the refit went on without it."""

    epoch: int = Field(default=0, ge=0, description="epoch is the group's epoch in this attempt.")
    lost: tuple[ShortText, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description="lost are the pods that were lost.",
        json_schema_extra=schema(list_type="atomic"),
    )
    phase: ShortText = Field(default="", description="phase is where the first of them was lost.")
    why: BriefText = Field(default="", description="why says what became of it.")
    seconds: float = Field(default=0, ge=0, description="seconds is how long the attempt took.")


class RefitSummary(ApiModel):
    """One refit that has ended, as a row of the history."""

    refit: ShortText = Field(default="", description="refit is the refit's id.")
    version: int = Field(default=0, ge=0, description="version is the weight version that was sent.")
    epoch: int = Field(default=0, ge=0, description="epoch is the group's epoch.")
    outcome: ShortText = Field(default="", description="outcome is Complete or Failed.")
    started_at: ShortText | None = Field(default=None, description="startedAt is when it began, in RFC 3339.")
    finished_at: ShortText | None = Field(default=None, description="finishedAt is when it ended, in RFC 3339.")
    members: int = Field(default=0, ge=0, description="members is the number of engines that took part.")
    engines: int = Field(
        default=0, ge=0, description="engines is the number of engines that the fleet should have had."
    )
    missing: tuple[ShortText, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description="missing are engines that were not waited for any longer and were left behind.",
        json_schema_extra=schema(list_type="atomic"),
    )
    nbytes: int = Field(default=0, ge=0, description="nbytes is the number of bytes sent.")
    seconds: dict[str, float] = Field(
        default_factory=dict,
        description="seconds are the wall seconds of each phase.",
        json_schema_extra=schema(max_properties=32),
    )
    pause_seconds: float = Field(default=0, ge=0, description="pauseSeconds is how long engines stood still.")
    gigabytes_per_second: float = Field(default=0, ge=0, description="gigabytesPerSecond is the speed of the transfer.")
    transport: ShortText = Field(default="", description="transport is the one that was taken.")
    staged: bool = Field(default=False, description="staged says that the weights arrived while the engines served.")
    slowest: ShortText = Field(default="", description="slowest is the pod and local rank that had the version last.")
    slowest_lag_seconds: float = Field(
        default=0, ge=0, description="slowestLagSeconds is how much later than the engine in the middle."
    )
    attempts: tuple[AttemptSummary, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description=f"attempts are those that lost a member, the first {MAX_LINES} of them.",
        json_schema_extra=schema(list_type="atomic"),
    )
    phase: ShortText = Field(default="", description="phase is where a failed refit stood.")
    member: ShortText = Field(default="", description="member is the pod to blame, when there is one.")
    code: ShortText = Field(default="", description="code is the failure's stable name.")
    message: BriefText = Field(
        default="", description="message says why it failed; the newest one is whole in lastRefit."
    )


class Progress(ApiModel):
    """The refit under way."""

    refit: ShortText = Field(default="", description="refit is the refit's id.")
    version: int = Field(default=0, ge=0, description="version is the weight version on its way.")
    epoch: int = Field(default=0, ge=0, description="epoch is the group's epoch.")
    phase: ShortText = Field(default="", description="phase is where it stands.")
    attempt: int = Field(default=1, ge=0, description="attempt counts from 1; a member that is lost makes the next.")
    started_at: ShortText | None = Field(default=None, description="startedAt is when the phase began, in RFC 3339.")
    deadline_seconds: float = Field(
        default=0,
        ge=0,
        description="deadlineSeconds is how long the phase may last from its beginning on; 0 is no bound.",
    )
    waiting_for: tuple[ShortText, ...] = Field(
        default=(),
        max_length=MAX_LINES,
        description=f"waitingFor names those whose answer is missing, the first {MAX_LINES} of them.",
        json_schema_extra=schema(list_type="atomic"),
    )


class LedgerGap(ApiModel):
    """One reason why a group is not whole."""

    member: ShortText = Field(
        default="", description="member is who has not come: a pod, an engine without a pod, or the trainer."
    )
    what: BriefText = Field(
        description="what says why it has not come, or which variable differs and who has which value."
    )


class Laggard(ApiModel):
    """An engine that does not hold the committed version."""

    member: ShortText = Field(description="member is the engine's pod.")
    engine: int = Field(default=0, ge=0, description="engine is its number.")
    state: ShortText = Field(
        default="", description="state is what the engine says of itself, or Stale, Overdue, Late or Silent."
    )
    version: int = Field(default=0, ge=0, description="version is the one that it holds.")
    message: BriefText = Field(default="", description="message says why, and what is being done about it.")
