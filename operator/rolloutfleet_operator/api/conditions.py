"""Conditions of both kinds, and the documented constants that stand as their reasons."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel

ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(ApiModel):
    """One observation about an object; ``lastTransitionTime`` moves only when ``status`` flips."""

    type: str = Field(min_length=1, max_length=316, description="type is the condition's name.")
    status: ConditionStatus = Field(description="status is True, False or Unknown.")
    observed_generation: int = Field(
        default=0, ge=0, description="observedGeneration is the generation that the condition speaks of."
    )
    last_transition_time: str = Field(
        max_length=64,
        description="lastTransitionTime is when status last changed.",
        json_schema_extra={"format": "date-time"},
    )
    reason: str = Field(min_length=1, max_length=1024, description="reason is a constant for programs.")
    message: str = Field(default="", max_length=32768, description="message is a sentence for people.")


class FleetCondition(StrEnum):
    """Condition types of a RolloutFleet."""

    READY = "Ready"
    """Every engine that should exist serves the committed version, and the sync job can refit them."""
    RECONCILING = "Reconciling"
    """The operator, or something it waits for, is at work; kstatus reads it."""
    STALLED = "Stalled"
    """Nothing will get better until someone acts; kstatus reads it."""
    PLACEMENT_SATISFIED = "PlacementSatisfied"
    """Every engine has a node, and one that fits exists."""
    WEIGHTS_CURRENT = "WeightsCurrent"
    """Every engine holds the committed weight version."""


class SyncCondition(StrEnum):
    """Condition types of a WeightSync."""

    ACTIVE = "Active"
    """The fleet's sync job works for this object."""
    READY = "Ready"
    """The sync job answers trainers; its own word."""


class Reason(StrEnum):
    """Why a condition stands as it does."""

    ALL_ENGINES_READY = "AllEnginesReady"
    """Ready: every engine serves and the sync job answers."""
    ENGINES_STARTING = "EnginesStarting"
    """Engines pull their image, load the model, or wait for a place in the queue of the kubelet."""
    ENGINES_UPDATING = "EnginesUpdating"
    """Engines of an older revision are being replaced, one at a time."""
    ENGINE_FAILING = "EngineFailing"
    """An engine's container ends with an error again and again, or cannot be made; the message carries its own words."""
    ENGINE_RETIRED = "EngineRetired"
    """An engine failed more often than recovery.restartBudget allows and is not replaced; the message says what gives it another chance."""
    IMAGE_PULL_FAILING = "ImagePullFailing"
    """The kubelet cannot pull an image."""
    UNSCHEDULABLE = "Unschedulable"
    """The scheduler finds no node for an engine pod; the message is the scheduler's."""
    NO_NODE_FITS = "NoNodeFits"
    """No node offers as many GPUs as one engine needs; engines that serve are left alone."""
    SYNC_NOT_READY = "SyncNotReady"
    """The sync pod does not answer yet."""
    SYNC_FAILING = "SyncFailing"
    """The sync pod ends with an error again and again."""
    AWAITING_FIRST_REFIT = "AwaitingFirstRefit"
    """The engines hold random weights (loadFormat Dummy) and wait for a trainer."""
    ENGINES_ASLEEP = "EnginesAsleep"
    """A trainer has put engines to sleep and wakes them when it is done."""
    AWAITING_NEXT_REFIT = "AwaitingNextRefit"
    """An engine that came after the last refit takes the version over from a peer, or waits for the next refit, before it serves."""
    SUSPENDED = "Suspended"
    """spec.suspend is true."""
    INVALID_SPEC = "InvalidSpec"
    """The object breaks a rule that the message names; nothing is retried before it changes."""
    OWNERSHIP_CONFLICT = "OwnershipConflict"
    """An object with a name that the fleet needs belongs to someone else."""
    BLOCKED = "Blocked"
    """Another party must act first, as the message says."""
    REFUSED = "Refused"
    """The cluster's policy refuses an object that the fleet needs; the message is the API server's."""
    ACCESS_DENIED = "AccessDenied"
    """The operator's permissions do not allow something that the fleet needs."""
    API_UNAVAILABLE = "ApiUnavailable"
    """The API server has not answered for several passes."""
    INTERNAL_ERROR = "InternalError"
    """A fault of the operator; its log holds the stack."""
    SETTLED = "Settled"
    """Reconciling, Stalled: nothing is under way and nothing is wrong."""
    PROGRESSING = "Progressing"
    """Stalled=False: work is under way."""
    PLACED = "Placed"
    """PlacementSatisfied: every engine has a node."""
    PLACING = "Placing"
    """PlacementSatisfied: some engine has no node yet."""
    CURRENT = "Current"
    """WeightsCurrent: every engine holds the committed version."""
    ENGINES_BEHIND = "EnginesBehind"
    """WeightsCurrent: some engine does not hold the committed version."""
    CHECKPOINT_REFIT = "CheckpointRefit"
    """WeightsCurrent, Reconciling: weights.checkpoint is on its way, or waits for its turn; the message says for what."""
    CHECKPOINT_FAILED = "CheckpointFailed"
    """WeightsCurrent, Stalled: the Job that sends weights.checkpoint has failed for good; the message is its own, and engines serve on."""
    NO_REPORT = "NoReport"
    """WeightsCurrent: the sync job has not reported yet."""
    NOTHING_RUNS = "NothingRuns"
    """PlacementSatisfied, WeightsCurrent: the fleet has no engines now."""
    SERVING_FLEET = "ServingFleet"
    """Active: the fleet's sync job works for this WeightSync."""
    WAITING_FOR_TURN = "WaitingForTurn"
    """Active: an older WeightSync of the fleet is active; the message names it."""
    SENT = "Sent"
    """Active: the checkpoint has been sent, and its version is committed."""
    NOT_OF_FLEET = "NotOfFleet"
    """Active: the fleet's weights.checkpoint is not this WeightSync's, or is no more."""
    FLEET_NOT_FOUND = "FleetNotFound"
    """Active: no fleet of that name is in the namespace."""
