"""``spec.placement``: what engines need of a node."""

from pydantic import Field

from rolloutfleet_operator.api.base import ApiModel


class PlacementSpec(ApiModel):
    """What engines need of a node."""

    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        max_length=316,
        description="gpuResource is the extended resource that counts GPUs; empty runs the engines on CPUs.",
    )
