"""Where blocks of a whole tensor lie in a process that holds a box of it: pure geometry, counted in elements."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from rolloutfleet.layout.blocks import Block, region

SCATTERED: Final = 4096
"""A block that lies in more runs than this, at no even distance, is read by copying instead."""


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a whole tensor and how its elements lie locally, counted from the box's first element."""

    whole: tuple[int, ...]
    """Shape of the whole tensor, which counts its elements row by row."""
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.whole) == len(self.start) == len(self.shape) == len(self.strides):
            raise ValueError(f"a box {list(self.shape)} at {list(self.start)} is not one of {list(self.whole)}")
        for size, begin, length in zip(self.whole, self.start, self.shape, strict=True):
            if begin < 0 or length < 0 or begin + length > size:
                raise ValueError(
                    f"a box of shape {list(self.shape)} at {list(self.start)} does not lie within {list(self.whole)}"
                )

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def first(self) -> int:
        """Index in the whole tensor of the box's first element."""
        return sum(begin * stride for begin, stride in zip(self.start, row_major(self.whole), strict=True))

    @property
    def extent(self) -> int:
        """Elements from the first to the last in local memory, gaps included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def pieces(self) -> tuple[Block, ...]:
        """The box as blocks of the whole tensor; ValueError when it falls into too many."""
        return region(self.whole, self.start, self.shape)

    def holds(self, block: Block) -> bool:
        """Whether the block's first element lies in the box."""
        return bool(self.elements) and _index(block.offset - self.first, _merged(self)) is not None

    def locate(self, block: Block) -> tuple[Block, ...] | None:
        """The block's elements as blocks of local memory, in its order; None when they are scattered there.

        Raises ValueError when the block does not lie within the box.
        """
        axes = _merged(self)
        runs = _even_rows(block, self, axes) or _runs(block, self, axes)
        return None if runs is None else _joined(runs)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, slots=True)
class _Axis:
    size: int
    whole: int
    local: int


def _merged(box: Region) -> list[_Axis]:
    """The box's axes with those joined that are one run on both sides; the last one steps by single elements."""
    axes: list[_Axis] = []
    for size, whole, local in zip(box.shape, row_major(box.whole), box.strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1].whole == whole * size and axes[-1].local == local * size:
            axes[-1] = _Axis(axes[-1].size * size, whole, local)
        else:
            axes.append(_Axis(size, whole, local))
    if not axes or axes[-1].whole != 1:
        axes.append(_Axis(1, 1, 1))
    return axes


def _index(position: int, axes: Sequence[_Axis]) -> tuple[int, ...] | None:
    """Coordinates of an element of the whole tensor, counted from the box's first one; None when it is not in the box."""
    found: list[int] = []
    for axis in axes:
        step, position = divmod(position, axis.whole)
        if not 0 <= step < axis.size:
            return None
        found.append(step)
    return tuple(found)


def _even_rows(block: Block, box: Region, axes: Sequence[_Axis]) -> list[Block] | None:
    """One local block, where rows step along one axis only, as nearly all do; None otherwise."""
    if axes[-1].local != 1:
        return None
    first = _index(block.offset - box.first, axes)
    last = _index(block.offset + (block.rows - 1) * block.stride - box.first, axes)
    if first is None or last is None or last[-1] + block.run > axes[-1].size:
        return None
    moved = [axis for axis, (one, other) in enumerate(zip(first, last, strict=True)) if one != other]
    if len(moved) > 1 or first[-1] + block.run > axes[-1].size:
        return None
    offset = _local(first, axes)
    if not moved:
        return [Block(offset, 1, block.run, block.run)]
    axis = axes[moved[0]]
    stride, remainder = divmod(block.stride, axis.whole)
    if remainder or stride * axis.local < block.run:
        return None
    return [Block(offset, block.rows, block.run, stride * axis.local)]


def _runs(block: Block, box: Region, axes: Sequence[_Axis]) -> list[Block] | None:
    """Local runs one by one; None when there are too many, or when neighbours in the whole tensor are no neighbours here."""
    runs: list[Block] = []
    for position, length in _row_starts(block, box.first):
        left = length
        while left:
            index = _index(position, axes)
            if index is None:
                raise ValueError(
                    f"element {position + box.first} of {block} does not lie in the box of shape {list(box.shape)} at "
                    f"{list(box.start)} of {list(box.whole)}"
                )
            taken = min(left, axes[-1].size - index[-1])
            if len(runs) == SCATTERED or (taken > 1 and axes[-1].local != 1):
                return None
            runs.append(Block(_local(index, axes), 1, taken, taken))
            position, left = position + taken, left - taken
    return runs


def _row_starts(block: Block, first: int) -> Iterator[tuple[int, int]]:
    for row in range(block.rows):
        yield block.offset + row * block.stride - first, block.run


def _local(index: Sequence[int], axes: Sequence[_Axis]) -> int:
    return sum(step * axis.local for step, axis in zip(index, axes, strict=True))


def _joined(runs: Sequence[Block]) -> tuple[Block, ...]:
    """One block where single runs of one length follow at one distance."""
    if len(runs) < 2:
        return tuple(runs)
    steps = {after.offset - before.offset for before, after in pairwise(runs)}
    step = next(iter(steps))
    if len(steps) > 1 or len({run.run for run in runs}) > 1 or step < runs[0].run:
        return tuple(runs)
    return (Block(runs[0].offset, len(runs), runs[0].run, step),)
