"""Sums over blocks of tensors that do not depend on how the tensors were cut, and the digest made of them.

A block's bytes are read as signed little-endian words of ``unit`` bytes. Each source tensor has two sums that wrap at 64 bits,
``s1 = sum(w)`` and ``s2 = sum(w * (i + 1))``, where ``i`` is the word's index in the *whole* source tensor. So the sums of any partition
of a tensor, summed by as many ranks as there are, add up to those of the whole. They find lost, swapped, stale and damaged data; they
are no defence against somebody who forges weights.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch

from rolloutfleet.tiles.hostsums import HostSums
from rolloutfleet.tiles.hostwork import copy_alone, share_out
from rolloutfleet.tiles.tables import Item, Strip, Table

if TYPE_CHECKING:
    from rolloutfleet.layout.blocks import Block

UNITS: Final = (4, 2, 1)
"""Bytes that a word may have."""

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class SumEntry(NamedTuple):
    """A block of a contiguous tensor that holds block ``source_block`` of source tensor number ``source``.

    The source block counts in the tensor's element type, whatever type the source tensor had before a cast. ``unit`` divides both
    blocks in bytes, and is the same for all entries of a source tensor.
    """

    tensor: torch.Tensor
    block: "Block"
    source: int
    source_block: "Block"
    unit: int


class CopySumEntry(NamedTuple):
    """A copy whose target is summed as block ``whole_block`` of source tensor number ``source``."""

    tensor: torch.Tensor
    block: "Block"
    target: torch.Tensor
    target_block: "Block"
    source: int
    whole_block: "Block"
    unit: int


class _Sums(Table):
    _adds = True

    def __init__(self, items: Sequence[Item], sources: int, device: torch.device | None) -> None:
        for number, item in enumerate(items):
            if not 0 <= item.source < sources:
                raise ValueError(f"entry {number}: there is no source tensor {item.source} among {sources}")
            if item.unit not in UNITS:
                raise ValueError(f"entry {number}: words of {item.unit} bytes; a word has {', '.join(map(str, UNITS))}")
        self.sources = sources
        super().__init__(items, device)

    def run(self, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Sums int64 [sources, 2] of what the blocks hold now, on the tensors' device and in the order of the current stream.

        Adds to ``sums`` where those are given, and returns them.
        """
        if sums is None:
            sums = torch.zeros((self.sources, 2), dtype=torch.int64, device=self.device)
        if self._kernels:
            self._launch(sums)
            return sums
        parts = torch.zeros((len(self._strips), 2), dtype=torch.int64)
        share_out(list(zip(self._strips, parts.unbind(0), strict=True)), self._run_strips, self._threads)
        return sums.index_add_(0, torch.tensor([strip.source for strip in self._strips], dtype=torch.int64), parts)

    def _run_strips(self, strips: Sequence[tuple[Strip, torch.Tensor]]) -> None:
        adder = HostSums()
        for strip, part in strips:
            if self._copies:
                copy_alone(strip.views[-1], strip.views[0])
            adder.add(_words(strip.views[-1], strip.unit), strip.first, strip.step, part)


class SumTable(_Sums):
    """Sums of many blocks, made ready once; keeps the tensors alive, and is valid while they lie where they are."""

    _copies = False

    @classmethod
    def build(
        cls,
        entries: Iterable[SumEntry | tuple[torch.Tensor, "Block", int, "Block", int]],
        sources: int,
        device: torch.device | None = None,
    ) -> Self:
        """A table of the entries; ``device`` matters only where there are none.

        Also compiles what running it needs. Raises ValueError, naming the entry, when a tensor is not contiguous or on another device,
        when its block leaves it, when two blocks differ in their number of elements, when ``unit`` does not divide them, or when there is
        no such source.
        """
        items = [Item((tensor,), (block, whole), source, unit) for tensor, block, source, whole, unit in entries]
        return cls(items, sources, device)


class CopySumTable(_Sums):
    """Copies, and sums of what their targets hold afterwards: each tile is read back from where it was stored."""

    _copies = True

    @classmethod
    def build(
        cls,
        entries: Iterable[CopySumEntry | tuple[torch.Tensor, "Block", torch.Tensor, "Block", int, "Block", int]],
        sources: int,
        device: torch.device | None = None,
    ) -> Self:
        """A table of the entries; raises what :meth:`SumTable.build` and :meth:`~rolloutfleet.tiles.copying.CopyTable.build` raise."""
        items = [
            Item((tensor, target), (block, place, whole), source, unit)
            for tensor, block, target, place, source, whole, unit in entries
        ]
        return cls(items, sources, device)


def sums_digest(layout_digest: str, sums: torch.Tensor) -> str:
    """Hex SHA-256 over the digest of a layout and the sums [sources, 2] of what a rank of that layout holds."""
    numbers = sums.flatten().tolist()
    digest = hashlib.sha256(f"rolloutfleet sums 1 {layout_digest} {sums.shape[0]}\n".encode())
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.hexdigest()


def _words(view: torch.Tensor, unit: int) -> torch.Tensor:
    octets = view.view(torch.uint8)
    if octets.storage_offset() % unit or octets.stride(0) % unit:
        moved = torch.empty(octets.shape, dtype=torch.uint8)
        copy_alone(moved, octets)
        octets = moved
    return octets.view(_WORDS[unit])
