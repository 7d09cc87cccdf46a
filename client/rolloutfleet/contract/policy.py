"""How a refit is to be carried out: the part of a fleet's ``spec.refit`` that the sync job and the workers follow."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Transport(StrEnum):
    """How weights travel from the trainer to the workers."""

    AUTO = "Auto"
    """The fastest of the others that trainer and workers can both do; status says which, and why not a faster one."""
    LAYOUT = "Layout"
    """Each rank receives only its own slices, straight into its live parameters; over NCCL on GPUs, over Gloo on CPUs."""
    COLOCATED = "Colocated"
    """Workers copy from memory that they share with the trainer: CUDA IPC on one GPU or node, shared memory on CPUs."""
    NATIVE = "Native"
    """vLLM's own packed NCCL broadcast and vLLM's loader: engines on GPUs."""
    GLOO = "Gloo"
    """The same over torch.distributed's Gloo: engines on CPUs."""

    @property
    def by_layout(self) -> bool:
        """Whether tensors are cut for each rank by its layout, instead of being broadcast whole."""
        return self in {Transport.LAYOUT, Transport.COLOCATED}


class Wire(StrEnum):
    """What carries the bytes of a group."""

    GLOO = "Gloo"
    """torch.distributed's Gloo over TCP."""
    NCCL = "Nccl"
    """One NCCL communicator over all ranks."""
    MEMORY = "Memory"
    """No group: the trainer shows its memory, workers map it."""


class Staging(StrEnum):
    """Whether weights are received while the engines serve."""

    AUTO = "Auto"
    """Where every rank has room for a second copy of its weights, they arrive beside the live ones; the pause is a local copy."""
    NEVER = "Never"
    """Weights arrive in the live parameters, while the engines are paused."""


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
    preparing_seconds: int = Field(
        120,
        ge=1,
        le=86400,
        description="preparingSeconds bounds the time until trainer and workers have laid out a transfer by layout.",
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
    staging: Staging = Staging.AUTO
    pause: PauseMode = PauseMode.KEEP
    cache: CachePolicy = CachePolicy.RESET
    deadlines: RefitDeadlines = Field(default_factory=RefitDeadlines)
