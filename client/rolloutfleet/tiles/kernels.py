"""The one Triton kernel behind all tables. Also correct in Triton's interpreter, which runs it on CPU tensors."""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

COLUMNS = tl.constexpr(9)
"""Numbers of a tile in a table: source address, address, vectors, vectors of a row, vectors from row to row at the source and at the
address, index of the first word in the whole source tensor, words from row to row there, number of the source tensor."""

BLOCK_BYTES: Final = 16 << 10
"""Bytes that a program moves at a time: with :data:`WARPS`, four 16-byte vectors in flight for each thread."""
WARPS: Final = 8

_LONGEST_BLOCK: Final = 2048
"""Vectors of a block, where they are narrow: each takes registers of its own."""

_INTEGERS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _run_tiles(
    table: tl.tensor,
    sums: tl.tensor,
    width: tl.constexpr,
    unit: tl.constexpr,
    strided: tl.constexpr,
    copies: tl.constexpr,
    adds: tl.constexpr,
    moved_type: tl.constexpr,
    moved_lanes: tl.constexpr,
    word_type: tl.constexpr,
    word_lanes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    tile = table + tl.program_id(0).to(tl.int64) * COLUMNS
    source_address = tl.load(tile)
    address = tl.load(tile + 1)
    vectors = tl.load(tile + 2).to(tl.int32)
    run = tl.load(tile + 3).to(tl.int32)
    source_step = tl.load(tile + 4).to(tl.int32)
    step = tl.load(tile + 5).to(tl.int32)
    place_step = tl.load(tile + 7).to(tl.int32)
    plain = tl.zeros([block], tl.int64)
    placed = tl.zeros([block], tl.int64)
    for start in range(0, vectors, block):
        vector = start + tl.arange(0, block)
        live = (vector < vectors)[:, None]
        row = vector // run if strided else tl.zeros([block], tl.int32)
        column = vector - row * run if strided else vector
        at = (row * step + column)[:, None]
        if copies:
            lane = tl.arange(0, moved_lanes)[None, :]
            source = tl.multiple_of(source_address.to(tl.pointer_type(moved_type)), width)
            target = tl.multiple_of(address.to(tl.pointer_type(moved_type)), width)
            source_at = (row * source_step + column)[:, None]
            moved = tl.load(source + (source_at * moved_lanes + lane), mask=live)
            tl.store(target + (at * moved_lanes + lane), moved, mask=live)
        if adds:
            lane = tl.arange(0, word_lanes)[None, :]
            stored = tl.multiple_of(address.to(tl.pointer_type(word_type)), width)
            if copies:
                # What other threads of this program have stored is read back, from the level of cache that all of them share.
                tl.debug_barrier()
                words = tl.load(stored + (at * word_lanes + lane), mask=live, other=0, cache_modifier=".cg")
            else:
                words = tl.load(stored + (at * word_lanes + lane), mask=live, other=0)
            words = words.to(tl.int64)
            if width < unit:
                # Sums are linear: each part of a word counts as what it adds to the word, and only the highest part has a sign.
                part = (column % (unit // width))[:, None]
                words = tl.where(part == unit // width - 1, words, words & ((1 << (8 * width)) - 1))
                words = words << (part * (8 * width)).to(tl.int64)
                place = (row * place_step + column // (unit // width))[:, None]
            else:
                place = (row * place_step + column * word_lanes)[:, None] + lane
            plain += tl.sum(words, 1)
            placed += tl.sum(words * (place + 1).to(tl.int64), 1)
    if adds:
        first = tl.load(tile + 6)
        total = sums + 2 * tl.load(tile + 8)
        whole = tl.sum(plain, 0)
        tl.atomic_add(total, whole, sem="relaxed")
        tl.atomic_add(total + 1, tl.sum(placed, 0) + first * whole, sem="relaxed")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: rows of :data:`COLUMNS` int64 numbers [n, columns] whose tiles are all alike in these respects.

    ``width`` is the largest of 16, 8, 4, 2, 1 that divides all addresses and distances in bytes, ``unit`` the bytes of a word (1, 2, 4).
    """

    table: torch.Tensor
    width: int
    unit: int
    strided: bool

    def compile(self, *, copies: bool, adds: bool) -> None:
        """Compiles the kernel by running it over a tile of nothing, so that later runs start at once."""
        nothing = self.table.new_zeros(1, self.table.shape[1])
        self._launch(nothing, nothing.new_zeros(1, 2) if adds else None, copies=copies)

    def run(self, sums: torch.Tensor | None, *, copies: bool) -> None:
        """Queues the launch on the current stream; adds to ``sums`` (int64 [sources, 2]) unless that is None."""
        if self.table.is_cuda:
            # The table was made on another stream perhaps, and may be dropped as soon as this returns.
            self.table.record_stream(torch.cuda.current_stream(self.table.device))
        self._launch(self.table, sums, copies=copies)

    def _launch(self, table: torch.Tensor, sums: torch.Tensor | None, *, copies: bool) -> None:
        moved, word = min(self.width, 8), min(self.width, self.unit)
        _run_tiles[(table.shape[0],)](
            table,
            table if sums is None else sums,
            width=self.width,
            unit=self.unit,
            strided=self.strided,
            copies=copies,
            adds=sums is not None,
            moved_type=_INTEGERS[moved],
            moved_lanes=self.width // moved,
            word_type=_INTEGERS[word],
            word_lanes=self.width // word,
            block=min(BLOCK_BYTES // self.width, _LONGEST_BLOCK),
            num_warps=WARPS,
        )
