"""Compact canonical bytes for tables of numbers with a JSON header.

The canonical form is a line that names the kind and its version, the header as one line of JSON, and each column as little-endian
int64 differences between neighbours. What travels is that, compressed: regular tables of megabytes become kilobytes.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

from rolloutfleet.layout.blocks import Block

MAX_BYTES: Final = 1 << 30
"""Canonical bytes above which nothing is decoded, however small it came."""


def canonical_bytes(kind: str, header: Mapping[str, Any], columns: Sequence[Sequence[int]]) -> bytes:
    """The same bytes for the same content on every machine; columns may differ in length, of which the header must tell."""
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return b"".join([f"{kind}\n{text}\n".encode(), *map(_column_bytes, columns)])


def compress(canonical: bytes) -> bytes:
    """What :func:`decompress` reads."""
    return zlib.compress(canonical, 6)


def decompress(kind: str, data: bytes) -> tuple[bytes, bytes]:
    """The header's JSON and the bytes of the columns.

    Raises ValueError for bytes that are damaged, cut short or followed by others, and for another kind or version.
    """
    stream = zlib.decompressobj()
    try:
        canonical = stream.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"{kind}: {len(data)} bytes cannot be decompressed: {error}") from error
    if stream.unconsumed_tail:
        raise ValueError(f"{kind}: {len(data)} bytes decompress to more than {MAX_BYTES}")
    if not stream.eof:
        raise ValueError(f"{kind}: {len(data)} bytes end in the middle of the compressed stream")
    if stream.unused_data:
        raise ValueError(f"{kind}: {len(stream.unused_data)} bytes follow the end of the compressed stream")
    lines = canonical.split(b"\n", 2)
    if len(lines) != 3 or lines[0] != kind.encode():
        raise ValueError(f"expected {kind!r}; the bytes begin with {lines[0][:64]!r}")
    return lines[1], lines[2]


def read_columns(kind: str, body: bytes, lengths: Sequence[int]) -> list[list[int]]:
    """Columns of these lengths.

    Raises ValueError when the bytes are not exactly these columns.
    """
    if len(body) != 8 * sum(lengths):
        raise ValueError(
            f"{kind}: columns of {sum(lengths)} numbers take {8 * sum(lengths)} bytes; there are {len(body)}"
        )
    columns: list[list[int]] = []
    offset = 0
    for length in lengths:
        columns.append(list(accumulate(struct.unpack_from(f"<{length}q", body, offset))))
        offset += 8 * length
    return columns


def block_columns(blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Offsets, rows, runs and strides."""
    return (
        [block.offset for block in blocks],
        [block.rows for block in blocks],
        [block.run for block in blocks],
        [block.stride for block in blocks],
    )


def read_blocks(kind: str, columns: Sequence[Sequence[int]]) -> list[Block]:
    """The blocks of four columns.

    Raises ValueError, which names the entry, for numbers that are no block, or not the ones that :func:`block_columns` gives for it.
    """
    blocks: list[Block] = []
    for offset, rows, run, stride in zip(*columns, strict=True):
        try:
            block = Block(offset, rows, run, stride)
        except ValueError as error:
            raise ValueError(f"{kind}: entry {len(blocks)}: {error}") from error
        if (block.rows, block.run, block.stride) != (rows, run, stride):
            raise ValueError(
                f"{kind}: entry {len(blocks)}: {rows} runs of {run}, {stride} apart, are to be written as {block}"
            )
        blocks.append(block)
    return blocks


def _column_bytes(column: Sequence[int]) -> bytes:
    if not column:
        return b""
    return struct.pack(f"<{len(column)}q", column[0], *(after - before for before, after in pairwise(column)))
