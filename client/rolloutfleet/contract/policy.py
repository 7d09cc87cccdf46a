"""How a refit is to be carried out: the part of a fleet's ``spec.refit`` that the sync job and the workers follow."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Transport(StrEnum):
    """How weights travel from the trainer to the workers."""

    GLOO = "Gloo"
    """torch.distributed's Gloo over TCP: engines on CPUs."""
    NATIVE = "Native"
    """vLLM's own packed NCCL broadcast: engines on GPUs."""


class PauseMode(StrEnum):
    """What happens to requests in flight while weights change."""

    KEEP = "Keep"
    """They freeze and go on with the new weights."""
    WAIT = "Wait"
    """They finish with the old weights first."""
    ABORT = "Abort"
    """They end with finish reason ``abort``."""


class CachePolicy(StrEnum):
    """What happens to the prefix cache that the old weights filled."""

    RESET = "Reset"
    KEEP = "Keep"


class RefitDeadlines(BaseModel):
    """Seconds that each phase of a refit may take before it is aborted."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    forming_seconds: int = Field(
        120, ge=1, le=86400, description="formingSeconds bounds the time until every member has joined the group."
    )
    pausing_seconds: int = Field(
        60, ge=1, le=86400, description="pausingSeconds bounds the time until every engine has paused."
    )
    transferring_seconds: int = Field(
        600, ge=1, le=86400, description="transferringSeconds bounds the transfer of one weight version."
    )
    verifying_seconds: int = Field(
        120, ge=1, le=86400, description="verifyingSeconds bounds the comparison of digests."
    )
    committing_seconds: int = Field(
        60, ge=1, le=86400, description="committingSeconds bounds the publication of the version on every engine."
    )
    resuming_seconds: int = Field(
        60, ge=1, le=86400, description="resumingSeconds bounds the time until every engine generates again."
    )


class RefitPolicy(BaseModel):
    """A fleet's refit policy, as the sync job receives it."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    transport: Transport
    pause: PauseMode = PauseMode.KEEP
    cache: CachePolicy = CachePolicy.RESET
    deadlines: RefitDeadlines = Field(default_factory=RefitDeadlines)
