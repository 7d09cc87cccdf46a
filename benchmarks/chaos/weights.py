"""Weights that tell their version: what the trainer sends, and the checksum that an engine answers with while it computes from them."""

import zlib
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

LAYERS: Final = 8
ROWS: Final = 256
COLUMNS: Final = 1024
TOTAL_BYTES: Final = LAYERS * (ROWS + 1) * COLUMNS * 4


def named_weights(version: int) -> Iterator[tuple[str, Array]]:
    """Every tensor of a version in checkpoint format, by name; version 0 is what engines load at their start."""
    for layer in range(LAYERS):
        generator = np.random.default_rng((version, layer))
        yield f"layers.{layer}.weight", generator.random((ROWS, COLUMNS), dtype=np.float32)
        yield f"layers.{layer}.norm", generator.random(COLUMNS, dtype=np.float32)


def shard_of(array: Array, rank: int, ranks: int) -> Array:
    """What one of an engine's ranks holds: matrices by rows, vectors whole."""
    if array.ndim == 1:
        return array
    rows = array.shape[0] // ranks
    return array[rank * rows : (rank + 1) * rows]


def checksum_of(arrays: Iterator[Array]) -> str:
    """One number over all that a rank computes with, in the order of :func:`named_weights`."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, value)
    return f"{value:08x}"


def expected_checksum(version: int, ranks: int) -> str:
    """What an engine of so many ranks answers while it serves this very version."""
    return "-".join(
        checksum_of(shard_of(array, rank, ranks) for _, array in named_weights(version)) for rank in range(ranks)
    )
