"""Blocks of several tensors that correspond element by element, cut into tiles: rectangles that every one of them has.

All arithmetic is on int64 tensors, thousands of blocks at a time, and everything counts in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from rolloutfleet.layout.blocks import Block

_LARGEST_REACH: Final = 2**31 - 1
"""Within a tile kernels count in 32 bits."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What ``n`` entries are made of: ``offset``, ``run`` and ``stride`` are [n, g] for the ``g`` blocks of an entry, ``nbytes`` is [n]."""

    offset: torch.Tensor
    run: torch.Tensor
    stride: torch.Tensor
    nbytes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """``n`` rectangles of ``rows`` [n] runs of ``run`` [n] bytes; in block ``j`` they start at ``start[:, j]``, ``step[:, j]`` apart.

    A tile of one row has its run as step. ``entry`` [n] says which entry each was cut from.
    """

    start: torch.Tensor
    step: torch.Tensor
    rows: torch.Tensor
    run: torch.Tensor
    entry: torch.Tensor


def measure(entries: Sequence[tuple[Sequence["Block"], int]]) -> Geometry:
    """Geometry of entries, each given as blocks that correspond element by element and the bytes of an element.

    Raises ValueError when the blocks of an entry differ in their number of elements.
    """
    numbers: list[int] = []
    totals: list[int] = []
    for blocks, size in entries:
        total = blocks[0].rows * blocks[0].run
        for block in blocks:
            if block.rows * block.run != total:
                raise ValueError(f"entry {len(totals)}: {block} has not the {total} elements of {blocks[0]}")
            numbers += (block.offset * size, block.run * size, block.stride * size)
        totals.append(total * size)
    width = len(entries[0][0]) if entries else 1
    table = torch.tensor(numbers, dtype=torch.int64).view(-1, width, 3)
    offset, run, stride = table.unbind(2)
    return Geometry(offset, run, stride, torch.tensor(totals, dtype=torch.int64))


def cut(geometry: Geometry, tile_bytes: int, device: torch.device) -> Tiles:
    """Tiles of at most ``tile_bytes`` that cover every entry once, computed and held on the device."""
    return _tile(_pieces(geometry, device), tile_bytes)


def _pieces(geometry: Geometry, device: torch.device) -> Tiles:
    """The largest rectangles: where runs of one block are whole multiples of another's, rows of the shorter runs."""
    offset, runs, strides = (part.to(device) for part in (geometry.offset, geometry.run, geometry.stride))
    nbytes = geometry.nbytes.to(device)
    run = reduce(torch.gcd, runs.unbind(1))
    longer = torch.where(runs > run[:, None], runs, 0)
    piece = reduce(torch.gcd, longer.unbind(1))
    piece = torch.where(piece == 0, nbytes, piece)
    step = torch.where(runs > run[:, None], run[:, None], strides)

    entry, ordinal = _repeat(nbytes // piece)
    first = (ordinal * piece[entry])[:, None]
    runs = runs[entry]
    start = offset[entry] + first // runs * strides[entry] + first % runs
    return Tiles(start, step[entry], (piece // run)[entry], run[entry], entry)


def _tile(pieces: Tiles, tile_bytes: int) -> Tiles:
    width = pieces.run.clamp(max=tile_bytes)
    columns = (pieces.run + width - 1) // width
    reach = _LARGEST_REACH // pieces.step.amax(1)
    height = torch.minimum(tile_bytes // pieces.run, reach).clamp(min=1)
    piece, ordinal = _repeat((pieces.rows + height - 1) // height * columns)
    columns, width, height = columns[piece], width[piece], height[piece]
    row, column = ordinal // columns * height, ordinal % columns * width
    rows = torch.minimum(height, pieces.rows[piece] - row)
    run = torch.minimum(width, pieces.run[piece] - column)
    step = pieces.step[piece]
    start = pieces.start[piece] + row[:, None] * step + column[:, None]
    step = torch.where(rows[:, None] == 1, run[:, None], step)
    return Tiles(start, step, rows, run, pieces.entry[piece])


def _repeat(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index ``i`` as often as ``counts[i]``, and the number of each repetition."""
    index = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    return index, torch.arange(index.numel(), device=counts.device) - (counts.cumsum(0) - counts)[index]
