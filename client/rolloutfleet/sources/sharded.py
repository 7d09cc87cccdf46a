"""Tensors that the caller has sharded by its own rules, as Megatron does: a table says where each local tensor belongs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutfleet.sources.local import Box, Entry, LocalSource, dtype_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """A local tensor that is part ``index`` of ``count`` equal parts of a whole one, along ``dim``; by default the whole one.

    Where parts are not equal, ``start`` (the index along ``dim`` at which this one begins) and ``whole`` (the size of the whole tensor
    along ``dim``) say it instead. The tensor may be a view into a larger one, such as the query rows of a fused matrix.

    Raises ValueError for numbers that contradict each other.
    """

    tensor: "torch.Tensor"
    dim: int = 0
    index: int = 0
    count: int = 1
    start: int | None = None
    whole: int | None = None

    def __post_init__(self) -> None:
        dimensions = len(self.tensor.shape)
        if not 0 <= self.dim < max(dimensions, 1):
            raise ValueError(f"dim is {self.dim}, and the tensor has {dimensions} dimensions")
        if (self.start is None) != (self.whole is None):
            raise ValueError(f"start is {self.start} and whole is {self.whole}; give both, or index and count")
        if self.start is not None and (self.index, self.count) != (0, 1):
            raise ValueError(f"give start and whole, or index and count; index is {self.index} and count {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(f"index is {self.index}; of {self.count} parts it must be 0 to {self.count - 1}")
        size = self.tensor.shape[self.dim] if dimensions else 1
        if self.start is not None and self.whole is not None and not 0 <= self.start <= self.whole - size:
            raise ValueError(f"a part of {size} at {self.start} does not lie within the whole size of {self.whole}")

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        shape = [int(size) for size in self.tensor.shape]
        if shape:
            shape[self.dim] = shape[self.dim] * self.count if self.whole is None else self.whole
        return tuple(shape)

    @property
    def box(self) -> Box:
        """Where the tensor begins in the whole one."""
        begin = [0] * len(self.tensor.shape)
        if begin:
            begin[self.dim] = int(self.tensor.shape[self.dim]) * self.index if self.start is None else self.start
        return Box(self.tensor, tuple(begin))


class ShardedTensors(LocalSource):
    """Whole tensors by checkpoint name, each with the part or the parts of it that this rank holds.

    ``tensors`` maps a name to a :class:`Shard`, to several of them, or to a plain tensor, which is whole. A rank names only what it holds
    a part of; ranks that hold the same part (replicas) name it alike, and share the sending. ``refit`` must be called on every rank of
    the team. Raises ValueError naming a tensor whose parts contradict each other.
    """

    def __init__(self, tensors: "Mapping[str, Shard | Sequence[Shard] | torch.Tensor]") -> None:
        super().__init__()
        self._tensors = tensors

    def entries(self) -> Iterator[Entry]:
        """The tensors as they are now; ValueError naming one that cannot be sent."""
        for name, held in self._tensors.items():
            yield _entry(name, _shards(name, held))


def _shards(name: str, held: "Shard | Sequence[Shard] | torch.Tensor") -> Sequence[Shard]:
    if isinstance(held, Shard):
        return (held,)
    if not isinstance(held, Sequence):
        return (Shard(held),)
    strangers = sorted({type(part).__name__ for part in held if not isinstance(part, Shard)})
    if strangers or not held:
        raise ValueError(f"tensor {name} holds {', '.join(strangers) or 'no parts'}; give one Shard or several")
    return held


def _entry(name: str, shards: Sequence[Shard]) -> Entry:
    shapes = sorted({shard.whole_shape for shard in shards})
    dtypes = sorted({dtype_of(name, shard.tensor) for shard in shards})
    if len(shapes) > 1 or len(dtypes) > 1:
        raise ValueError(
            f"the parts of tensor {name} say that it is {' or '.join(str(list(shape)) for shape in shapes)} of {' or '.join(dtypes)}; "
            "parts of one tensor agree on dtype and whole shape"
        )
    return Entry(name, dtypes[0], shapes[0], tuple(shard.box for shard in shards))
