"""How blocks become payloads: long runs of a parameter travel as they lie there, the rest is packed into buckets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Final

from rolloutfleet.layout.blocks import Block, pair, section

ALIGNMENT: Final = 16
"""Every part of a packed payload begins at a multiple of this many bytes."""

LONE_BYTES: Final = 4 << 20
"""A block of at least this many bytes travels alone, so that its sender need not copy it next to others."""

DIRECT_BYTES: Final = 1 << 20
"""A shorter run of a parameter is packed together with others."""

Owners = tuple[int, ...]
"""Trainer ranks that hold the same block, ascending."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A block of a parameter, and the block of a source tensor that fills it."""

    source: int
    source_block: Block
    parameter: int
    block: Block
    itemsize: int
    owners: Owners

    @property
    def nbytes(self) -> int:
        return self.block.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Payload:
    """Fragments that travel together, with their byte offsets."""

    fragments: tuple[Fragment, ...]
    positions: tuple[int, ...]
    nbytes: int
    direct: bool

    @property
    def owners(self) -> Owners:
        return self.fragments[0].owners

    @property
    def place(self) -> tuple[int, int]:
        """Parameter and offset of the first fragment."""
        return self.fragments[0].parameter, self.fragments[0].block.offset


def pack(fragments: Iterable[Fragment], limits: Mapping[Owners, int]) -> list[Payload]:
    """Payloads of at most ``limits[owners]`` bytes that hold each fragment once, ordered by the place of their first one.

    Fragments come ordered by parameter and offset. Limits are multiples of :data:`ALIGNMENT`.
    """
    payloads: list[Payload] = []
    buckets: dict[Owners, _Bucket] = {owners: _Bucket(limit) for owners, limit in limits.items()}
    for run in _runs(fragments, limits):
        owners = run[0].owners
        nbytes = sum(fragment.nbytes for fragment in run)
        if run[0].block.is_contiguous and nbytes >= min(DIRECT_BYTES, limits[owners] // 4):
            payloads.append(_direct(run))
            continue
        for fragment in run:
            payloads += buckets[owners].add(fragment)
    for bucket in buckets.values():
        payloads += bucket.close()
    return sorted(payloads, key=lambda payload: payload.place)


def _runs(fragments: Iterable[Fragment], limits: Mapping[Owners, int]) -> Iterator[list[Fragment]]:
    """Neighbours in a parameter that one sender may send together: many small ones, or one large one or a part of it."""
    run: list[Fragment] = []
    filled = 0
    for fragment in fragments:
        limit = limits[fragment.owners]
        if fragment.nbytes >= min(LONE_BYTES, limit):
            if run:
                yield run
            run, filled = [], 0
            for part in _cut(fragment, limit):
                yield [part]
            continue
        if run and not (_follows(run[-1], fragment) and filled + fragment.nbytes <= limit):
            yield run
            run, filled = [], 0
        run.append(fragment)
        filled += fragment.nbytes
    if run:
        yield run


def _follows(before: Fragment, after: Fragment) -> bool:
    return (
        before.parameter == after.parameter
        and before.owners == after.owners
        and before.block.is_contiguous
        and after.block.is_contiguous
        and before.block.end == after.block.offset
    )


def _cut(fragment: Fragment, limit: int) -> Iterator[Fragment]:
    """Parts of about equal size; between rows where rows are small enough, else at multiples of the alignment."""
    most = limit // fragment.itemsize
    elements = fragment.block.elements
    if elements <= most:
        yield fragment
        return
    strided = [block.run for block in (fragment.source_block, fragment.block) if block.rows > 1]
    grain = lcm(*strided) if strided else most + 1
    if grain > most:
        grain = ALIGNMENT // fragment.itemsize
    size = -(-elements // -(-elements // most))
    size = min(-(-size // grain), most // grain) * grain
    for start in range(0, elements, size):
        count = min(size, elements - start)
        sides = section(fragment.source_block, start, count), section(fragment.block, start, count)
        for source_block, block in pair(*sides):
            yield Fragment(fragment.source, source_block, fragment.parameter, block, fragment.itemsize, fragment.owners)


class _Bucket:
    """Packs fragments of the same owners until the next one does not fit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fragments: list[Fragment] = []
        self._positions: list[int] = []
        self._filled = 0

    def add(self, fragment: Fragment) -> list[Payload]:
        """The payload that had to be closed before, if any."""
        size = -(-fragment.nbytes // ALIGNMENT) * ALIGNMENT
        closed = self.close() if self._filled + size > self._limit else []
        self._fragments.append(fragment)
        self._positions.append(self._filled)
        self._filled += size
        return closed

    def close(self) -> list[Payload]:
        fragments, positions, filled = self._fragments, self._positions, self._filled
        self._fragments, self._positions, self._filled = [], [], 0
        if not fragments:
            return []
        if fragments[0].block.is_contiguous and all(_follows(before, after) for before, after in pairwise(fragments)):
            return [_direct(fragments)]
        return [Payload(tuple(fragments), tuple(positions), filled, direct=False)]


def _direct(run: Sequence[Fragment]) -> Payload:
    start = run[0].block.offset
    positions = tuple((fragment.block.offset - start) * fragment.itemsize for fragment in run)
    return Payload(tuple(run), positions, positions[-1] + run[-1].nbytes, direct=True)
