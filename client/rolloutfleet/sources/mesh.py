"""Which box of a DTensor lies on one rank of its mesh: torch's rules of sharding as plain arithmetic on ranges of indices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING

from rolloutfleet.sources.local import Box, Entry, dtype_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension's share of a tensor dimension: part ``index`` of ``count``.

    ``split`` above 1 is how FSDP over tensor parallel lies: the dimension is cut into so many sections first, and the part is taken from
    each of them.
    """

    count: int
    index: int
    split: int = 1


def indices_of(size: int, cuts: Sequence[Cut]) -> tuple[range, ...]:
    """The indices of a dimension of ``size`` that are left after the cuts, in local order, as ranges that do not touch."""
    held: tuple[range, ...] = (range(size),)
    for cut in cuts:
        total = sum(map(len, held))
        parts = []
        for begin, end in _chunks(total, cut.split):
            begins = list(_chunks(end - begin, cut.count))
            if cut.index < len(begins):
                parts += _section(held, begin + begins[cut.index][0], begin + begins[cut.index][1])
        held = tuple(_touching_joined(parts))
    return held


def dtensor_entry(name: str, tensor: "DTensor") -> Entry:
    """The part of a DTensor that lies on this rank: nothing on a rank outside its mesh, the same on all replicas.

    Raises ValueError for a tensor whose parts have to be added up first (placement Partial).
    """
    import torch

    partial = [str(placement) for placement in tensor.placements if placement.is_partial()]
    if partial:
        raise ValueError(
            f"tensor {name} is spread as {', '.join(partial)}, whose parts have to be added up first: "
            "call redistribute() with Replicate or Shard on every rank before refit()"
        )
    whole = tuple(int(size) for size in tensor.shape)
    dtype = dtype_of(name, tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Entry(name, dtype, whole, ())
    with torch.no_grad():
        local = tensor.to_local()
    dtype_of(name, local)
    cuts: dict[int, list[Cut]] = {}
    for place, placement, count in zip(coordinate, tensor.placements, tensor.device_mesh.shape, strict=True):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            split = int(getattr(placement, "split_factor", 1))
            cuts.setdefault(dimension % len(whole), []).append(Cut(int(count), int(place), split))
    held = [indices_of(size, cuts.get(dimension, ())) for dimension, size in enumerate(whole)]
    sizes = tuple(sum(map(len, ranges)) for ranges in held)
    if tuple(local.shape) != sizes:
        raise ValueError(
            f"tensor {name} of shape {list(whole)} has a part of shape {list(local.shape)} here, where its placements "
            f"{[str(placement) for placement in tensor.placements]} on a mesh of {list(tensor.device_mesh.shape)} give {list(sizes)}"
        )
    return Entry(name, dtype, whole, tuple(_boxes(local, held)))


def _boxes(local: "DTensor", held: Sequence[tuple[range, ...]]) -> Iterator[Box]:
    places = [list(zip(ranges, accumulate(map(len, ranges), initial=0), strict=False)) for ranges in held]
    for corner in product(*places):
        part = local
        for dimension, (indices, begin) in enumerate(corner):
            part = part.narrow(dimension, begin, len(indices))
        yield Box(part, tuple(indices.start for indices, _ in corner))


def _chunks(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part as ``torch.chunk`` cuts: equal ones of the size rounded up, the last ones smaller or missing."""
    length = -(-size // count)
    for begin in range(0, size, length) if length else ():
        yield begin, min(begin + length, size)


def _section(ranges: Sequence[range], begin: int, end: int) -> list[range]:
    """Elements ``begin`` to ``end`` of the ranges laid one after another."""
    found = []
    for indices, before in zip(ranges, accumulate(map(len, ranges), initial=0), strict=False):
        part = indices[max(begin - before, 0) : max(end - before, 0)]
        if part:
            found.append(part)
    return found


def _touching_joined(ranges: Sequence[range]) -> Iterator[range]:
    joined: range | None = None
    for indices in ranges:
        if joined is not None and joined.stop == indices.start:
            joined = range(joined.start, indices.stop)
            continue
        if joined is not None:
            yield joined
        joined = indices
    if joined is not None:
        yield joined
