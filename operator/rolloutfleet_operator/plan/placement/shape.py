"""The shape of an engine: its parallel sizes, and how its ranks divide into pods of equal size, one pod a node.

Ranks are numbered with tensor fastest, then pipeline, then data, and a pod holds consecutive ones. Data parallelism inside an engine is
EP / TP, for vLLM's expert parallel group is DP x TP.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rolloutfleet_operator.errors import InvalidSpecError


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Sizes of one engine; ``expert`` 1 means none."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in ("tensor", "pipeline", "expert"):
            if (size := getattr(self, axis)) < 1:
                raise InvalidSpecError(f"parallelism.{axis} is {size}, but it must be at least 1")
        if self.expert > 1 and self.expert % self.tensor:
            below = self.expert // self.tensor * self.tensor
            instead = f"{below} or {below + self.tensor}" if below else f"{self.tensor}"
            raise InvalidSpecError(
                f"parallelism.expert is {self.expert}, which is no multiple of parallelism.tensor {self.tensor}: vLLM's expert group is "
                f"data x tensor; set expert to {instead}"
            )

    @property
    def data(self) -> int:
        """Data parallel size inside the engine."""
        return self.expert // self.tensor if self.expert > self.tensor else 1

    @property
    def replica(self) -> int:
        """Ranks that hold the model once, experts aside."""
        return self.tensor * self.pipeline

    @property
    def world(self) -> int:
        """Ranks, and GPUs, of the engine."""
        return self.data * self.replica

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.pipeline} x DP {self.data}"


class Nesting(StrEnum):
    """What stands between the engine and its tensor groups."""

    REPLICAS = "Replicas"
    """One data parallel replica each: the stages of one pipeline."""
    STAGES = "Stages"
    """One pipeline stage each (or as many as share a pod), over all data parallel ranks: the expert groups."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Pods of one engine. A tensor group takes ``tensor_pods`` of them, a middle unit ``middle_tensors`` tensor groups or pods."""

    gpus: int
    """Of each pod."""
    tensor_pods: int
    middle_tensors: int
    middles: int
    nesting: Nesting

    @property
    def pods(self) -> int:
        """Pods, and nodes, of the engine."""
        return self.middles * self.middle_pods

    @property
    def middle_pods(self) -> int:
        """Pods of a middle unit."""
        return self.middle_tensors * self.tensor_pods

    def pod_order(self) -> tuple[int, ...]:
        """For each pod in order of ranks its place when pods are listed by middle unit."""
        if self.nesting is Nesting.REPLICAS:
            return tuple(range(self.pods))
        return tuple(
            block * self.middle_pods + data * self.tensor_pods + pod
            for data in range(self.middle_tensors)
            for block in range(self.middles)
            for pod in range(self.tensor_pods)
        )


def find_shape(sizes: Parallelism, gpus: int, nesting: Nesting) -> Shape | None:
    """The shape with so many GPUs in each pod; None when tensor groups or replicas would not divide evenly."""
    replica, tensor = sizes.replica, sizes.tensor
    if sizes.world % gpus or (gpus % tensor and tensor % gpus) or (gpus % replica and replica % gpus):
        return None
    tensor_pods = max(1, tensor // gpus)
    if gpus >= replica:
        # A pod holds whole replicas, so every stage reaches into every pod.
        pods = sizes.world // gpus
        return Shape(gpus, 1, 1, pods, nesting) if nesting is Nesting.REPLICAS else Shape(gpus, 1, pods, 1, nesting)
    groups = replica // gpus // tensor_pods
    if nesting is Nesting.REPLICAS:
        return Shape(gpus, tensor_pods, groups, sizes.data, nesting)
    return Shape(gpus, tensor_pods, sizes.data, groups, nesting)


def shapes_for(
    sizes: Parallelism, node_gpus: Iterable[int], nesting: Nesting, wanted: int | None = None
) -> tuple[Shape, ...]:
    """Every shape that a kind of node can hold, that of the fewest pods first.

    Args:
        sizes: the engine's.
        node_gpus: GPUs of the nodes of that kind.
        nesting: what stands between engine and tensor groups.
        wanted: GPUs of each pod, or fewer where the engine has fewer; None for whatever divides evenly.
    """
    most, world = max(node_gpus, default=0), sizes.world
    choices = range(world, 0, -1) if wanted is None else (min(wanted, world),)
    found = (find_shape(sizes, gpus, nesting) for gpus in choices if gpus <= most)
    return tuple(shape for shape in found if shape)
