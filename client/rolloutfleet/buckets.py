"""How a manifest's tensors are packed into buffers for sending: both sides derive the same plan from the manifest alone."""

from dataclasses import dataclass
from typing import Final

from rolloutfleet.contract.manifest import Manifest, TensorSpec

BUCKET_BYTES: Final = 64 << 20
"""Buffers are filled up to this many bytes; larger tensors travel in a buffer of their own."""

ALIGNMENT: Final = 16
"""Every tensor begins at a multiple of this, so that its bytes may be viewed as any dtype in place."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat byte buffer and where each of its tensors begins."""

    index: int
    nbytes: int
    """Length of the buffer: a positive multiple of :data:`ALIGNMENT`."""
    entries: tuple[tuple[TensorSpec, int], ...]
    """Tensors in manifest order with their byte offsets."""


def plan_buckets(manifest: Manifest, limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets that hold every tensor of the manifest once, in manifest order.

    A bucket is closed before it would grow beyond ``limit_bytes``, padding included; a tensor that is larger than the limit has a
    bucket to itself. Raises ValueError when the limit is below :data:`ALIGNMENT`.
    """
    if limit_bytes < ALIGNMENT:
        raise ValueError(f"limit_bytes is {limit_bytes}; a bucket holds at least {ALIGNMENT} bytes")
    buckets: list[Bucket] = []
    entries: list[tuple[TensorSpec, int]] = []
    filled = 0
    for spec in manifest.tensors:
        size = _aligned(spec.nbytes)
        if entries and filled + size > limit_bytes:
            buckets.append(_bucket(len(buckets), filled, entries))
            entries, filled = [], 0
        entries.append((spec, filled))
        filled += size
    buckets.append(_bucket(len(buckets), filled, entries))
    return tuple(buckets)


def _bucket(index: int, filled: int, entries: list[tuple[TensorSpec, int]]) -> Bucket:
    return Bucket(index=index, nbytes=max(filled, ALIGNMENT), entries=tuple(entries))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
