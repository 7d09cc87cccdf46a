"""Regions of flat tensors as few evenly spaced runs, and the algebra over them that cutting tensors for ranks needs.

Everything counts in elements. A block has an order, which is also that of its offsets: run after run. Functions that return several
blocks keep to the order of what they were given, so that the n-th element of one sequence belongs to the n-th of another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Self

MAX_BLOCKS: Final = 4096
"""A view that needs more blocks than this is better left to whoever can copy it by its own strides."""


@dataclass(frozen=True, slots=True)
class Block:
    """``rows`` runs of ``run`` consecutive elements whose first elements lie ``stride`` apart, the first one at ``offset``.

    Equal regions of one order are equal blocks: runs that touch are folded into one, and a single run has itself as stride. Raises
    ValueError for an empty block, a negative offset, and runs that overlap.
    """

    offset: int
    rows: int
    run: int
    stride: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.rows < 1 or self.run < 1 or (self.rows > 1 and self.stride < self.run):
            raise ValueError(
                f"block of {self.rows} runs of {self.run} elements, {self.stride} apart, from element {self.offset}: "
                "offset must be at least 0, rows and run at least 1, and runs must not overlap"
            )
        if self.rows == 1:
            object.__setattr__(self, "stride", self.run)
        elif self.stride == self.run:
            object.__setattr__(self, "run", self.rows * self.run)
            object.__setattr__(self, "stride", self.run)
            object.__setattr__(self, "rows", 1)

    @classmethod
    def contiguous(cls, offset: int, elements: int) -> Self:
        """One run of ``elements`` from ``offset``."""
        return cls(offset, 1, elements, elements)

    @property
    def elements(self) -> int:
        return self.rows * self.run

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + (self.rows - 1) * self.stride + self.run

    @property
    def is_contiguous(self) -> bool:
        return self.rows == 1


def block_of(offset: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[Block, ...] | None:
    """The elements of a strided view (offset, sizes and strides as of ``torch.as_strided``) in the view's row-major order.

    Empty for a view without elements. None for a transposed view, whose innermost dimension steps farther than another one, and for a
    view of more than :data:`MAX_BLOCKS` blocks. Raises ValueError when sizes and strides differ in number.
    """
    if len(shape) != len(stride):
        raise ValueError(
            f"view of shape {list(shape)} has strides {list(stride)}: there must be one for each dimension"
        )
    if 0 in shape:
        return ()
    dims: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * step:
            dims[-1] = (dims[-1][0] * size, step)
        else:
            dims.append((size, step))
    run = 1
    if dims and dims[-1][1] == 1:
        run = dims.pop()[0]
    elif any(0 < step < dims[-1][1] for _, step in dims):
        return None
    rows, step = dims.pop() if dims and dims[-1][1] >= run else (1, run)
    blocks = 1
    for size, _ in dims:
        blocks *= size
    if blocks > MAX_BLOCKS:
        return None
    places = product(*(range(0, size * outer, outer) if outer else [0] * size for size, outer in dims))
    return tuple(Block(offset + sum(place), rows, run, step) for place in places)


def region(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> tuple[Block, ...]:
    """The box of a contiguous tensor that begins at ``starts`` and is ``sizes`` large, in row-major order; empty for an empty box.

    Raises ValueError when the box leaves the tensor or takes more than :data:`MAX_BLOCKS` blocks.
    """
    if len(starts) != len(shape) or len(sizes) != len(shape):
        raise ValueError(f"box from {list(starts)} of {list(sizes)} has not the dimensions of shape {list(shape)}")
    if any(
        start < 0 or size < 0 or start + size > whole for start, size, whole in zip(starts, sizes, shape, strict=True)
    ):
        raise ValueError(f"box from {list(starts)} of {list(sizes)} leaves a tensor of shape {list(shape)}")
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    blocks = block_of(sum(start * step for start, step in zip(starts, strides, strict=True)), sizes, strides)
    if blocks is None:
        raise ValueError(
            f"box from {list(starts)} of {list(sizes)} in {list(shape)} takes more than {MAX_BLOCKS} blocks"
        )
    return blocks


def section(block: Block, start: int, count: int) -> tuple[Block, ...]:
    """The ``count`` elements of the block from its ``start``-th on, in its order: at most three blocks.

    Raises ValueError when the block has no such elements.
    """
    if start < 0 or count < 0 or start + count > block.elements:
        raise ValueError(f"a block of {block.elements} elements has no elements {start} to {start + count}")
    blocks: list[Block] = []
    row, column = divmod(start, block.run)
    if column and count:
        taken = min(count, block.run - column)
        blocks.append(Block.contiguous(block.offset + row * block.stride + column, taken))
        count -= taken
        row += 1
    rows, rest = divmod(count, block.run)
    if rows:
        blocks.append(Block(block.offset + row * block.stride, rows, block.run, block.stride))
    if rest:
        blocks.append(Block.contiguous(block.offset + (row + rows) * block.stride, rest))
    return tuple(blocks)


def select(block: Block, positions: Block) -> tuple[Block, ...]:
    """The elements of ``block`` that stand at these positions of its order, in the order of ``positions``.

    Raises ValueError when a position is not in the block.
    """
    if positions.end > block.elements:
        raise ValueError(f"a block of {block.elements} elements has no position {positions.end - 1}")
    if block.is_contiguous:
        return (Block(block.offset + positions.offset, positions.rows, positions.run, positions.stride),)
    row, column = divmod(positions.offset, block.run)
    period, remainder = divmod(positions.stride, block.run)
    if positions.rows > 1 and remainder == 0 and column + positions.run <= block.run:
        start = block.offset + row * block.stride + column
        return (Block(start, positions.rows, positions.run, period * block.stride),)
    return tuple(piece for run in _runs(positions) for piece in section(block, run.offset, run.run))


def overlap(block: Block, other: Block) -> tuple[tuple[Block, Block], ...]:
    """What two blocks of one tensor share, as pairs: the shared elements, and their positions in the order of ``block``.

    This is also how to find a block inside one that holds all of it: the positions say where, piece by piece.
    """
    if other.offset >= block.end or block.offset >= other.end:
        return ()
    if block.is_contiguous and other.is_contiguous:
        start = max(block.offset, other.offset)
        count = min(block.end, other.end) - start
        return ((Block.contiguous(start, count), Block.contiguous(start - block.offset, count)),)
    if block.rows > 1 and block.stride == other.stride and other.rows > 1:
        return tuple(_overlap_of_equal_strides(block, other))
    if block.rows <= other.rows:
        return tuple(_overlap_by_rows(block, other))
    pairs: list[tuple[Block, Block]] = []
    for run in _runs(other):
        position = _below(block, run.offset)
        for piece in section(block, position, _below(block, run.end) - position):
            pairs.append((piece, Block.contiguous(position, piece.elements)))
            position += piece.elements
    return tuple(pairs)


def subtract(block: Block, other: Block) -> tuple[Block, ...]:
    """The elements of ``block`` that ``other`` does not have, as blocks that do not overlap."""
    shared = overlap(block, other)
    if not shared:
        return (block,)
    if block.is_contiguous:
        return tuple(_gaps(block, [piece for piece, _ in shared]))
    if block.stride == other.stride and other.rows > 1:
        rest = _around(block, shared[0][0])
        for piece, _ in shared[1:]:
            rest = tuple(left for part in rest for left in subtract(part, piece))
        return rest
    if block.rows <= other.rows:
        return tuple(left for run in _runs(block) for left in subtract(run, other))
    pieces: list[Block] = []
    position = 0
    for run in _runs(other):
        pieces += section(block, position, _below(block, run.offset) - position)
        position = _below(block, run.end)
    return (*pieces, *section(block, position, block.elements - position))


def pair(sources: Sequence[Block], destinations: Sequence[Block]) -> tuple[tuple[Block, Block], ...]:
    """Two sequences of blocks with equally many elements, cut so that the n-th blocks correspond element by element.

    Raises ValueError when the sequences differ in their number of elements.
    """
    have, want = sum(block.elements for block in sources), sum(block.elements for block in destinations)
    if have != want:
        raise ValueError(f"{have} source elements cannot fill {want} destination elements")
    pairs: list[tuple[Block, Block]] = []
    left, right = list(reversed(sources)), list(reversed(destinations))
    while left:
        source, destination = left.pop(), right.pop()
        count = min(source.elements, destination.elements)
        if source.elements == destination.elements:
            pairs.append((source, destination))
            continue
        for stack, block in ((left, source), (right, destination)):
            stack += reversed((*section(block, 0, count), *section(block, count, block.elements - count)))
    return tuple(pairs)


def join(before: Block, after: Block) -> Block | None:
    """The block of both one's elements, first those of ``before``; None when ``after`` does not go on as ``before`` does."""
    if before.is_contiguous and after.is_contiguous:
        if before.end != after.offset:
            return None
        return Block.contiguous(before.offset, before.run + after.run)
    stride = after.stride if before.is_contiguous else before.stride
    if before.run != after.run or after.offset != before.offset + before.rows * stride:
        return None
    if not after.is_contiguous and after.stride != stride:
        return None
    return Block(before.offset, before.rows + after.rows, before.run, stride)


def first_overlap(blocks: Iterable[Block]) -> tuple[Block, Block] | None:
    """Two of these blocks of one tensor that share elements; None when no two do. The blocks must be ordered by their offsets."""
    reaching: list[Block] = []
    for block in blocks:
        reaching = [other for other in reaching if other.end > block.offset]
        for other in reaching:
            if overlap(other, block):
                return other, block
        reaching.append(block)
    return None


def _runs(block: Block) -> Iterator[Block]:
    for row in range(block.rows):
        yield Block.contiguous(block.offset + row * block.stride, block.run)


def _below(block: Block, offset: int) -> int:
    """How many elements of the block lie below an offset of the tensor."""
    if offset <= block.offset:
        return 0
    row, column = divmod(offset - block.offset, block.stride)
    return block.elements if row >= block.rows else row * block.run + min(column, block.run)


def _overlap_by_rows(block: Block, other: Block) -> Iterator[tuple[Block, Block]]:
    for row, run in enumerate(_runs(block)):
        start = _below(other, run.offset)
        for piece in section(other, start, _below(other, run.end) - start):
            position = row * block.run + piece.offset - run.offset
            yield piece, Block(position, piece.rows, piece.run, piece.stride)


def _overlap_of_equal_strides(block: Block, other: Block) -> Iterator[tuple[Block, Block]]:
    """At most two blocks: a run of ``other`` may reach from one period of ``block`` into the next."""
    shift, column = divmod(other.offset - block.offset, block.stride)
    for moved, begin in ((shift, column), (shift + 1, column - block.stride)):
        low, high = max(0, begin), min(block.run, begin + other.run)
        first, last = max(0, moved), min(block.rows, other.rows + moved)
        if low < high and first < last:
            shared = Block(block.offset + first * block.stride + low, last - first, high - low, block.stride)
            yield shared, Block(first * block.run + low, last - first, high - low, block.run)


def _gaps(whole: Block, pieces: Sequence[Block]) -> Iterator[Block]:
    """What is left of one run beside pieces of it that follow each other."""
    cursor = whole.offset
    for piece in pieces:
        if piece.offset > cursor:
            yield Block.contiguous(cursor, piece.offset - cursor)
        if piece.rows > 1:
            yield Block(piece.offset + piece.run, piece.rows - 1, piece.stride - piece.run, piece.stride)
        cursor = piece.end
    if whole.end > cursor:
        yield Block.contiguous(cursor, whole.end - cursor)


def _around(block: Block, inner: Block) -> tuple[Block, ...]:
    """What is left of a block around a rectangle inside it whose runs each lie in one run of the block."""
    first, column = divmod(inner.offset - block.offset, block.stride)
    after, right = first + inner.rows, block.run - column - inner.run
    rest: list[Block] = []
    if first:
        rest.append(Block(block.offset, first, block.run, block.stride))
    if column:
        rest.append(Block(block.offset + first * block.stride, inner.rows, column, block.stride))
    if right:
        rest.append(Block(inner.offset + inner.run, inner.rows, right, block.stride))
    if after < block.rows:
        rest.append(Block(block.offset + after * block.stride, block.rows - after, block.run, block.stride))
    return tuple(rest)
