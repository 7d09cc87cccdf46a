"""What the sending side asks of weights, however a trainer keeps them."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rolloutfleet.contract.manifest import Manifest, TensorSpec

if TYPE_CHECKING:
    import torch

    from rolloutfleet.layout.blocks import Block
    from rolloutfleet.layout.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Span:
    """Where elements of a source tensor lie: ``block`` counts elements of ``tensor``, which is flat and shares the memory."""

    tensor: "torch.Tensor"
    block: "Block"

    @property
    def view(self) -> "torch.Tensor":
        """The elements [rows, run], in place."""
        block, first = self.block, self.tensor.storage_offset() + self.block.offset
        return self.tensor.as_strided((block.rows, block.run), (block.stride, 1), first)


@runtime_checkable
class WeightSource(Protocol):
    """The tensors of one weight version, or the part of them that this trainer rank holds.

    ``source`` is always a tensor's index in the manifest given to :meth:`bind`, which is this rank's own or, in a team whose ranks hold
    different tensors, the one merged from all ranks.
    """

    def manifest(self, known: Manifest | None = None) -> Manifest:
        """Name, dtype and whole shape of every tensor that this rank knows; ``known`` itself where it says the same.

        Raises ValueError naming a tensor that cannot be sent.
        """
        ...

    def bind(self, manifest: Manifest) -> None:
        """Reads the tensors again, to send these ones, and counts them by ``manifest``.

        Raises ValueError naming the first one that is not as :meth:`manifest` described it.
        """
        ...

    def gpu(self) -> int | None:
        """Index of the GPU on which the tensors lie, or the first of them; None when that is the host's memory."""
        ...

    def shareable(self) -> bool:
        """Whether other processes on the machine can be shown the first tensor's memory; that of the host can always be copied to where
        they can."""
        ...

    def addresses(self) -> Hashable:
        """Where the tensors lay when they were bound: equal on two bound sources only if the spans of one are those of the other."""
        ...

    def holdings(self, rank: int, ranks: int) -> "Holdings":
        """What trainer rank ``rank`` of ``ranks`` (this process) holds of the bound manifest's tensors."""
        ...

    def spans(self, source: int, block: "Block") -> tuple[Span, ...] | None:
        """Where the block's elements lie, in the block's order; None where they have to be read, because they are scattered here.

        ``block`` must lie within one piece of the holdings, else ValueError.
        """
        ...

    def read(
        self, source: int, block: "Block", dtype: "torch.dtype | None" = None, device: "torch.device | None" = None
    ) -> "torch.Tensor":
        """The block's elements as a flat contiguous tensor of ``dtype`` on ``device``: a view where they lie so, else a copy made now."""
        ...

    def whole(self) -> "Iterator[tuple[TensorSpec, torch.Tensor]]":
        """Every tensor of the bound manifest, whole, in order; ValueError for one that this rank holds only a part of."""
        ...
