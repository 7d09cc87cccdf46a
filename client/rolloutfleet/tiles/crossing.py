"""Copies out of the host's memory into a GPU's, made by its copy engines: kernels that decode are not in their way."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from rolloutfleet.tiles.digesting import CopySumEntry, CopySumTable, SumTable

if TYPE_CHECKING:
    from rolloutfleet.layout.blocks import Block

Entries = Iterable[CopySumEntry | tuple[torch.Tensor, "Block", torch.Tensor, "Block", int, "Block", int]]


class CrossingTable:
    """What a :class:`~rolloutfleet.tiles.digesting.CopySumTable` is within one device, for sources in the host's memory.

    Runs of memory that is pinned on both sides of the crossing go as they are; strided blocks are gathered by torch on the way.
    """

    def __init__(self, entries: Sequence[CopySumEntry], sources: int, device: torch.device) -> None:
        self._pairs = [(_view(entry.tensor, entry.block), _view(entry.target, entry.target_block)) for entry in entries]
        self.nbytes = sum(target.numel() * target.element_size() for _, target in self._pairs)
        self._sums = SumTable.build(
            [(entry.target, entry.target_block, entry.source, entry.whole_block, entry.unit) for entry in entries],
            sources,
            device,
        )

    def run(self, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Queues the copies on the current stream, then the sums of what the targets hold; as :meth:`CopySumTable.run`."""
        for source, target in self._pairs:
            target.copy_(source.reshape(target.shape), non_blocking=True)
        return self._sums.run(sums)


def copy_sum_table(entries: Entries, sources: int, device: torch.device) -> CopySumTable | CrossingTable:
    """The table for these entries, wherever their sources lie: all on ``device``, or all in the host's memory.

    Raises what :meth:`CopySumTable.build` raises.
    """
    listed = [CopySumEntry(*entry) for entry in entries]
    if all(entry.tensor.device == device for entry in listed):
        return CopySumTable.build(listed, sources, device)
    return CrossingTable(listed, sources, device)


def _view(tensor: torch.Tensor, block: "Block") -> torch.Tensor:
    flat = tensor.detach().view(-1)
    shape, strides = ((block.rows, block.run), (block.stride, 1)) if block.rows > 1 else ((block.run,), (1,))
    return flat.as_strided(shape, strides, flat.storage_offset() + block.offset)
