"""Which rank of its engine a process is: by its place in vLLM's groups, not by the order in which processes came up."""

from dataclasses import dataclass
from typing import Any


class MisplacedError(RuntimeError):
    """vLLM's groups say another rank than its configuration: weights meant for one rank would reach another."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process on each axis, and how long the inner two are."""

    data: int
    pipeline: int
    tensor: int
    stages: int
    width: int

    @property
    def rank(self) -> int:
        """Tensor fastest, then pipeline, then data."""
        return (self.data * self.stages + self.pipeline) * self.width + self.tensor

    def __str__(self) -> str:
        return f"data {self.data}, pipeline {self.pipeline}, tensor {self.tensor}"


def rank_in_engine(parallel: Any, place: Place | None) -> int:
    """The rank, of all that the engine has in all its pods.

    Args:
        parallel: vLLM's parallel configuration in this process.
        place: what vLLM's groups say; None where there are none.

    Raises:
        MisplacedError: the two differ.
    """
    rank = int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
    if place is not None and place.rank != rank:
        raise MisplacedError(
            f"vLLM's groups put this process at {place} of {place.stages} x {place.width} ranks a replica, which is rank {place.rank}, "
            f"and its configuration says rank {rank} (data {parallel.data_parallel_index}, {parallel.rank} of {parallel.world_size})"
        )
    return rank


def find_place(parallel: Any) -> Place | None:
    """This process in vLLM's groups; None where it has formed none."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    tensor, pipeline = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return Place(
        data=parallel.data_parallel_index,
        pipeline=pipeline.rank_in_group,
        tensor=tensor.rank_in_group,
        stages=pipeline.world_size,
        width=tensor.world_size,
    )
