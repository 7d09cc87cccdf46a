"""``spec.refit``: how new weights reach the engines."""

from pydantic import Field

from rolloutfleet.contract.policy import CachePolicy, PauseMode, RefitDeadlines, Staging, Transport
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
    deadlines: RefitDeadlines = Field(
        default_factory=RefitDeadlines, description="deadlines bound each phase of a refit, in seconds."
    )
