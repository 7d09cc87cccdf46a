"""``spec.refit``: how new weights reach the engines."""

from pydantic import Field

from rolloutfleet.contract.policy import (
    CachePolicy,
    LateJoin,
    OnFailure,
    PauseMode,
    RefitDeadlines,
    RollingPolicy,
    Staging,
    Strategy,
    Transport,
    Verify,
)
from rolloutfleet_operator.api.base import ApiModel


class RefitSpec(ApiModel):
    """How new weights reach the engines."""

    transport: Transport = Field(
        default=Transport.AUTO,
        description="transport is how weights travel: Colocated copies them out of the trainer's memory on the same device, "
        "Layout sends each rank its own slices, Native (GPUs) and Gloo (CPUs) broadcast whole tensors to vLLM's loader; "
        "Auto is the first of these that trainer and engines can all do, and status says which and why.",
    )
    staging: Staging = Field(
        default=Staging.AUTO,
        description="staging is Auto to receive weights beside the live ones while the engines serve, wherever every rank has "
        "room for a second copy, or Never to receive them in place while the engines are paused.",
    )
    pause: PauseMode = Field(
        default=PauseMode.KEEP,
        description="pause says what becomes of requests in flight: Keep freezes them, Wait lets them finish, Abort ends them.",
    )
    cache: CachePolicy = Field(
        default=CachePolicy.RESET,
        description="cache says what becomes of the prefix cache that the old weights filled.",
    )
    min_ready: int = Field(
        default=1,
        ge=1,
        description="minReady is the fewest engines with which a refit begins, or goes on when others are lost: those that are left "
        "get the version again from its beginning, and the refit completes with them.",
    )
    on_failure: OnFailure = Field(
        default=OnFailure.SERVE_OLD,
        description="onFailure says what engines that are whole do after a refit that failed: ServeOld lets them serve the committed "
        "version, Hold has them refuse requests until a refit completes, Fleet.release() is called, or this field changes. "
        "An engine whose weights are a mixture never serves.",
    )
    strategy: Strategy = Field(
        default=Strategy.ALL_AT_ONCE,
        description="strategy is AllAtOnce to give every engine a version in one refit, or Rolling to give it to a first wave and have "
        "the others take it over from those that hold it, a few at a time, while they serve the version before. A refit waits until "
        "the roll of the one before is over. Adapters, and trainers that fix the world size, always reach all engines at once.",
    )
    rolling: RollingPolicy | None = Field(
        default=None, description="rolling bounds a refit with strategy Rolling; it is refused with any other."
    )
    verify: Verify = Field(
        default=Verify.BYTES,
        description="verify is Bytes to commit a version when every rank holds what was sent, by its digest, or Full to have every rank "
        "load that version once more into a fresh model by vLLM's own loaders, and compare all that it computes with. Full pauses the "
        "engines for as long as that takes, stages nothing, and needs room for a second model on every rank.",
    )
    late_join: LateJoin = Field(
        default=LateJoin.PEER,
        description="lateJoin is where an engine that lacks the committed version gets it between refits: Peer takes it from an "
        "engine that serves it, Checkpoint does too, and where no engine can lend it takes weights.checkpoint again, while that is the "
        "committed version; Wait has the engine wait for the next refit.",
    )
    deadlines: RefitDeadlines = Field(
        default_factory=RefitDeadlines, description="deadlines bound each phase of a refit, in seconds."
    )
