"""Copying thousands of blocks between tensors of one device at the speed of one flat copy."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from rolloutfleet.tiles.hostwork import copy_alone, share_out
from rolloutfleet.tiles.tables import Item, Strip, Table

if TYPE_CHECKING:
    from rolloutfleet.layout.blocks import Block


class CopyEntry(NamedTuple):
    """A block of one tensor that goes into an equally large block of another of the same type; both tensors are contiguous."""

    source: torch.Tensor
    source_block: "Block"
    target: torch.Tensor
    target_block: "Block"


class CopyTable(Table):
    """Copies, made ready once; keeps the tensors alive, and is valid while they lie where they are."""

    _copies = True
    _adds = False

    @classmethod
    def build(
        cls,
        entries: Iterable[CopyEntry | tuple[torch.Tensor, "Block", torch.Tensor, "Block"]],
        device: torch.device | None = None,
    ) -> Self:
        """A table of the entries; ``device`` matters only where there are none.

        Also compiles what running it needs. Raises ValueError, naming the entry, when tensors are not contiguous, differ in device or
        type, when a block leaves its tensor, or when two blocks differ in their number of elements.
        """
        return cls([Item((source, target), (block, place)) for source, block, target, place in entries], device)

    def run(self) -> None:
        """Copies everything: one kernel launch for tiles of a kind on the current stream, torch's copies on a CPU.

        Overlapping sources and targets give undefined bytes.
        """
        if self._kernels:
            self._launch(None)
        else:
            share_out(self._strips, _copy_strips, self._threads)


def _copy_strips(strips: Sequence[Strip]) -> None:
    for strip in strips:
        copy_alone(strip.views[1], strip.views[0])
