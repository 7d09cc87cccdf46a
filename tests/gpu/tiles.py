"""How close tables of copies and sums come to the memory's speed, and whether they are right, on one GPU. No vLLM.

Checks random tables against torch's indexing and plain sums; then, for the shapes of a dense 7B model and of eight layers of a 30B
mixture of experts, times copies into fused parameters beside a flat ``copy_`` of the same bytes in chunks of 1 GiB, sums beside a plain
read, and copies with sums beside copies. Prints one line of JSON; leaves with 1 when something is wrong. By hand::

    PYTHONPATH=client python3 tests/gpu/tiles.py           # TINY=1 for a machine without GPU, SWEEP=1 for other tile sizes as well
"""

import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

from rolloutfleet.digest import StreamDigest
from rolloutfleet.layout.blocks import Block
from rolloutfleet.tiles import tables
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet.tiles.digesting import CopySumTable, SumTable, sums_digest

TINY = os.environ.get("TINY") == "1"
SWEEP = os.environ.get("SWEEP") == "1"
DEVICE = torch.device("cpu" if TINY else "cuda:0")
ROUNDS = 3 if TINY else 20
CHUNK = 1 << 30

Placement = tuple[torch.Tensor, torch.Tensor, int]
"""A source tensor, and the parameter that takes it from an element on."""


def whole(tensor: torch.Tensor, offset: int = 0) -> Block:
    return Block(offset, 1, tensor.numel(), tensor.numel())


def indices(block: Block) -> list[int]:
    return [block.offset + row * block.stride + column for row in range(block.rows) for column in range(block.run)]


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def milliseconds(work: Callable[[], object]) -> float:
    """Median wall time, a synchronise each."""
    for _ in range(2):
        work()
    wait()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def random_block(chance: random.Random, elements: int) -> Block:
    rows = chance.choice([rows for rows in range(1, elements + 1) if elements % rows == 0])
    run = elements // rows
    return Block(chance.randrange(9), rows, run, run + chance.randrange(9))


def bits(elements: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    size = (elements + shift) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE).view(dtype)[shift:]


def check_random_tables() -> int:
    """How many random tables were right: copies as torch's indexing copies, sums as the host's code sums."""
    chance = random.Random(1)
    for number in range(20 if TINY else 150):
        dtype = chance.choice([torch.uint8, torch.bfloat16, torch.float32, torch.int64])
        copies, summed, wanted = [], [], []
        for source in range(chance.randrange(1, 6)):
            elements = chance.choice([1, 7, 24, 96, 360, 4096, 65_520, 98_304])
            block, place, index = (random_block(chance, elements) for _ in range(3))
            origin = bits(block.end + 3, dtype, chance.randrange(4))
            target = bits(place.end + 3, dtype, chance.randrange(4))
            expected = target.clone()
            expected[torch.tensor(indices(place), device=DEVICE)] = origin[torch.tensor(indices(block), device=DEVICE)]
            distances = (block.run, place.run, index.offset, index.run, index.stride)
            unit = math.gcd(4, *(distance * dtype.itemsize for distance in distances))
            copies.append((origin, block, target, place))
            summed.append((target, place, source, index, unit))
            wanted.append(expected)
        CopyTable.build(copies).run()
        for (_, _, target, _), expected in zip(copies, wanted, strict=True):
            if not torch.equal(target.view(torch.uint8), expected.view(torch.uint8)):
                raise SystemExit(f"random table {number}: copied {copies} wrongly")
        on_host = [(target.cpu(), *rest) for target, *rest in summed]
        reference = SumTable.build(on_host, sources=6).run()
        both = [(*copy, *rest[2:]) for copy, rest in zip(copies, summed, strict=True)]
        for table in (SumTable.build(summed, sources=6), CopySumTable.build(both, sources=6)):
            if not torch.equal(table.run().cpu(), reference):
                raise SystemExit(f"random table {number}: {type(table).__name__} of {summed} is wrong")
    return number + 1


def parameter(*parts: tuple[int, ...]) -> Iterator[Placement]:
    """Source tensors of these shapes, one after the other in one fused parameter."""
    sizes = [math.prod(shape) for shape in parts]
    fused = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=DEVICE)
    for shape, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
        yield torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(), fused, start


def attention(hidden: int, heads: int, groups: int) -> Iterator[Placement]:
    yield from parameter((heads, hidden), (groups, hidden), (groups, hidden))
    yield from parameter((hidden, heads))
    yield from parameter((hidden,))
    yield from parameter((hidden,))


def dense(layers: int, hidden: int, inner: int, groups: int, vocabulary: int) -> Iterator[Placement]:
    yield from parameter((vocabulary, hidden))
    for _ in range(layers):
        yield from attention(hidden, hidden, groups)
        yield from parameter((hidden,), (groups,), (groups,))
        yield from parameter((inner, hidden), (inner, hidden))
        yield from parameter((hidden, inner))
    yield from parameter((hidden,))
    yield from parameter((vocabulary, hidden))


def experts(layers: int, hidden: int, inner: int, number: int, vocabulary: int) -> Iterator[Placement]:
    yield from parameter((vocabulary, hidden))
    for _ in range(layers):
        yield from attention(hidden, 2 * hidden, hidden // 4)
        yield from parameter((number, hidden))
        yield from parameter(*[(inner, hidden)] * (2 * number))
        yield from parameter(*[(hidden, inner)] * number)
    yield from parameter((hidden,))
    yield from parameter((vocabulary, hidden))


def flat_copy(nbytes: int) -> float:
    origin = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    pairs = list(zip(torch.zeros_like(origin).split(CHUNK), origin.split(CHUNK), strict=True))
    return milliseconds(lambda: [target.copy_(source) for target, source in pairs])


def plain_read(nbytes: int) -> float:
    """The fastest of torch's own reductions over the same bytes."""
    memory = torch.zeros(nbytes // 16 * 16, dtype=torch.uint8, device=DEVICE)
    ways = [[part.view(dtype) for part in memory.split(CHUNK)] for dtype in (torch.float32, torch.int64)]
    return min(milliseconds(lambda parts=parts: [part.sum() for part in parts]) for parts in ways)


def measure(name: str, placements: list[Placement]) -> dict[str, object]:
    nbytes = sum(source.nbytes for source, _, _ in placements)
    copies = [(source, whole(source), fused, whole(source, start)) for source, fused, start in placements]
    sums = [(fused, place, at, block, 4) for at, (_, block, fused, place) in enumerate(copies)]
    both = [(*copy, at, copy[1], 4) for at, copy in enumerate(copies)]
    started = time.perf_counter()
    copy = CopyTable.build(copies)
    wait()
    first = time.perf_counter() - started
    started = time.perf_counter()
    copy = CopyTable.build(copies)
    wait()
    built = time.perf_counter() - started
    copy.run()
    wrong = sum(not torch.equal(fused[at : at + source.numel()], source.view(-1)) for source, fused, at in placements)
    held = SumTable.build(sums, sources=len(placements))
    copied = CopySumTable.build(both, sources=len(placements))
    own = SumTable.build(
        [(source, block, at, block, 4) for at, (source, block, _, _) in enumerate(copies)], len(placements)
    )
    table = own.run().cpu()
    digests = {sums_digest(name, found) for found in (table, held.run().cpu(), copied.run().cpu())}
    for at in random.Random(2).sample(range(len(placements)), min(30, len(placements))):
        stream = StreamDigest()
        stream.update("w", placements[at][0])
        by_hand = StreamDigest()
        by_hand._hash.update(f"w bfloat16 {list(placements[at][0].shape)} {table[at, 0]} {table[at, 1]}\n".encode())
        wrong += stream.hexdigest() != by_hand.hexdigest()
    flat, read = flat_copy(nbytes), plain_read(nbytes)
    copy_ms, sums_ms, both_ms = milliseconds(copy.run), milliseconds(held.run), milliseconds(copied.run)
    report: dict[str, object] = {
        "bytes": nbytes,
        "tensors": len(placements),
        "right": wrong == 0 and len(digests) == 1,
        "build_first_seconds": first,
        "build_seconds": built,
        "flat_copy_ms": flat,
        "copy_ms": copy_ms,
        "copy_times_flat": copy_ms / flat,
        "plain_read_ms": read,
        "plain_read_gbps": nbytes / read / 1e6,
        "sums_ms": sums_ms,
        "sums_gbps": nbytes / sums_ms / 1e6,
        "sums_percent_of_read": 100 * read / sums_ms,
        "copy_and_sum_ms": both_ms,
        "copy_and_sum_times_copy": both_ms / copy_ms,
        "copy_and_sum_times_flat": both_ms / flat,
    }
    if SWEEP and DEVICE.type == "cuda":
        report["sweep"] = sweep(copies, sums, both, len(placements))
    return report


def sweep(copies: list, sums: list, both: list, sources: int) -> dict[str, list[float]]:
    """Milliseconds of copy, sums, and copy with sums, by KiB of a tile, KiB of a block, and warps."""
    from rolloutfleet.tiles import kernels

    before = tables.TILE_BYTES, kernels.BLOCK_BYTES, kernels.WARPS
    found = {}
    for tile, block, warps in itertools.product((32, 64, 128), (8, 16, 32), (4, 8, 16)):
        tables.TILE_BYTES, kernels.BLOCK_BYTES, kernels.WARPS = tile << 10, block << 10, warps
        works = (CopyTable.build(copies), SumTable.build(sums, sources), CopySumTable.build(both, sources))
        found[f"{tile}/{block}/{warps}"] = [round(milliseconds(work.run), 3) for work in works]
    tables.TILE_BYTES, kernels.BLOCK_BYTES, kernels.WARPS = before
    return found


def row_parallel(rows: int, columns: int, matrices: int) -> dict[str, object]:
    """Half the columns of many matrices, as a rank of two takes them of down_proj: short runs, strided at the source."""
    half = columns // 2
    sources = [torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(matrices)]
    targets = [torch.zeros(rows, half, dtype=torch.bfloat16, device=DEVICE) for _ in range(matrices)]
    slice_ = Block(half, rows, half, columns)
    table = CopyTable.build(
        [(source, slice_, target, whole(target)) for source, target in zip(sources, targets, strict=True)]
    )
    table.run()
    sums = SumTable.build([(target, whole(target), at, slice_, 4) for at, target in enumerate(targets)], matrices)
    at_source = SumTable.build([(source, slice_, at, slice_, 4) for at, source in enumerate(sources)], matrices)
    right = all(torch.equal(target, source[:, half:]) for source, target in zip(sources, targets, strict=True))
    flat = flat_copy(table.nbytes)
    copy_ms, sums_ms = milliseconds(table.run), milliseconds(sums.run)
    return {
        "bytes": table.nbytes,
        "right": right and torch.equal(sums.run(), at_source.run()),
        "copy_ms": copy_ms,
        "copy_times_flat": copy_ms / flat,
        "sums_ms": sums_ms,
        "sums_gbps": table.nbytes / sums_ms / 1e6,
    }


def main() -> None:
    report: dict[str, object] = {
        "torch": torch.__version__,
        "device": DEVICE.type,
        "random_tables": check_random_tables(),
    }
    if DEVICE.type == "cuda":
        import triton

        report |= {"device": torch.cuda.get_device_name(DEVICE), "triton": triton.__version__}
    if TINY:
        report["dense"] = measure("dense", list(dense(2, 64, 160, 16, 256)))
        report["moe"] = measure("moe", list(experts(2, 64, 48, 8, 256)))
        report["row_parallel"] = row_parallel(64, 160, 4)
    else:
        report["dense"] = measure("dense", list(dense(28, 3584, 18_944, 512, 152_064)))
        torch.cuda.empty_cache()
        report["moe"] = measure("moe", list(experts(8, 2048, 768, 128, 151_936)))
        torch.cuda.empty_cache()
        report["row_parallel"] = row_parallel(3584, 18_944, 56)
    print(json.dumps(report))
    cases = [case for case in report.values() if isinstance(case, dict)]
    sys.exit(0 if all(case["right"] for case in cases) else 1)


if __name__ == "__main__":
    main()
