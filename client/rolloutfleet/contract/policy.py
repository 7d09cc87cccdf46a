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


class Strategy(StrEnum):
    """How many engines take a version in the refit itself."""

    ALL_AT_ONCE = "AllAtOnce"
    """Every engine, from the trainer."""
    ROLLING = "Rolling"
    """A first wave, from the trainer; the other engines serve on, and take the version over from those that have it."""


class RollingPolicy(BaseModel):
    """Bounds of a refit that goes through the fleet in waves."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    max_unavailable: int = Field(
        1,
        ge=1,
        le=65536,
        description="maxUnavailable is how many engines may be out of service at a time. One that is gone or broken for another "
        "reason counts too, until half of maxStaleSeconds has passed: from then on one engine at a time is refitted all the same. "
        "It is also the size of the wave that the trainer sends to. An engine with room for a second copy of its weights takes "
        "the version over while it serves and is never out of service.",
    )
    max_stale_seconds: int = Field(
        300,
        ge=1,
        le=86400,
        description="maxStaleSeconds is how long after a version was published an engine may go on serving the one before; then "
        "it refuses requests until it has the new one.",
    )


class OnFailure(StrEnum):
    """What engines that are whole do after a refit that failed."""

    SERVE_OLD = "ServeOld"
    """They serve the committed version on."""
    HOLD = "Hold"
    """They refuse requests until a refit completes or somebody releases them; their weights stay as they are."""


class Verify(StrEnum):
    """How it is proved, before a version is committed, that an engine holds it."""

    BYTES = "Bytes"
    """What each rank holds has the digest of what the trainer sent."""
    FULL = "Full"
    """And what it computes with is what a fresh load of that version through vLLM's own loaders gives."""


class LateJoin(StrEnum):
    """Where an engine that lacks the committed version gets it between refits."""

    PEER = "Peer"
    """Out of the memory of an engine that serves it."""
    CHECKPOINT = "Checkpoint"
    """The same, and where no engine can lend it, from the checkpoint that the version came from."""
    WAIT = "Wait"
    """Nowhere: it waits for the next refit."""


class RefitDeadlines(BaseModel):
    """Seconds that each phase of a refit may take before it is aborted."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    forming_seconds: int = Field(
        120, ge=1, le=86400, description="formingSeconds bounds the time until every member has joined the group."
    )
    absent_seconds: int = Field(
        10,
        ge=0,
        le=86400,
        description="absentSeconds is how long a refit that could begin, since minReady engines are there, still waits for the "
        "others. Those left behind take the version over from a peer afterwards.",
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
    min_ready: int = Field(1, ge=1)
    """The fewest engines with which a refit begins, or goes on when others are lost."""
    on_failure: OnFailure = OnFailure.SERVE_OLD
    strategy: Strategy = Strategy.ALL_AT_ONCE
    rolling: RollingPolicy = Field(default_factory=RollingPolicy)
    """Counts where the strategy is Rolling."""
    verify: Verify = Verify.BYTES
    late_join: LateJoin = LateJoin.PEER
    deadlines: RefitDeadlines = Field(default_factory=RefitDeadlines)
