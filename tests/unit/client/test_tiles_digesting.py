"""Sums and their digest against plain Python integers, and what they must tell apart. Runs as torch code and in Triton's interpreter."""

import hashlib
import math
import os
import struct
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.digest import StreamDigest  # noqa: E402
from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.tiles import tables  # noqa: E402
from rolloutfleet.tiles.digesting import CopySumTable, SumTable, sums_digest  # noqa: E402
from rolloutfleet.tiles.hostwork import ENV_HOST_THREADS  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = settings(
    max_examples=12 if INTERPRETED else 150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
FORMATS = {1: "b", 2: "h", 4: "i"}


def wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def reference(tensor: "torch.Tensor", unit: int) -> list[int]:
    octets = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    words = struct.unpack(f"<{len(octets) // unit}{FORMATS[unit]}", octets)
    return [wrap(sum(words)), wrap(sum(word * place for place, word in enumerate(words, 1)))]


def whole(tensor: "torch.Tensor") -> Block:
    return Block(0, 1, tensor.numel(), tensor.numel())


def numbers(shape: tuple[int, ...], dtype: "torch.dtype", seed: int, shift: int = 0) -> "torch.Tensor":
    size = (math.prod(shape) + shift) * dtype.itemsize
    octets = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return octets.view(dtype)[shift:].view(shape)


def sums_of(tensor: "torch.Tensor", unit: int) -> list[int]:
    return SumTable.build([(tensor, whole(tensor), 0, whole(tensor), unit)], sources=1).run()[0].tolist()


@st.composite
def cuts(draw, size: int) -> list[tuple[int, int]]:
    inner = draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True)) if size > 1 else []
    edges = [0, *sorted(inner), size]
    return list(pairwise(edges))


@st.composite
def partitions(draw):
    """A matrix of arbitrary bits cut into boxes, each held in memory of its own: packed, or as columns of a wider buffer."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    rows, columns = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 8, 12, 40]))
    matrix = numbers((rows, columns), dtype, seed=draw(st.integers(0, 99)))
    holders = []
    for top, bottom in draw(cuts(rows)):
        for left, right in draw(cuts(columns)):
            high, wide, margin, shift = bottom - top, right - left, draw(st.integers(0, 3)), draw(st.integers(0, 3))
            held = numbers((high, wide + margin), dtype, seed=7, shift=shift)
            held[:, :wide] = matrix[top:bottom, left:right]
            holders.append(
                (held, Block(0, high, wide, wide + margin), Block(top * columns + left, high, wide, columns))
            )
    distances = [(block.run, place.offset, place.run, place.stride) for _, block, place in holders]
    sizes = [distance * dtype.itemsize for several in distances for distance in several]
    return matrix, holders, math.gcd(4, *sizes)


@EXAMPLES
@given(partitions(), st.sampled_from([16, 48, 1 << 16]))
def test_the_sums_of_any_partition_add_up_to_those_of_the_whole(partition, tile_bytes: int) -> None:
    matrix, holders, unit = partition
    with patch.object(tables, "TILE_BYTES", tile_bytes), patch.object(tables, "CACHED_BYTES", tile_bytes):
        table = SumTable.build([(held, block, 1, place, unit) for held, block, place in holders], sources=2)
        copied = CopySumTable.build(
            [(held, block, torch.empty_like(matrix), place, 1, place, unit) for held, block, place in holders],
            sources=2,
        )
    assert table.run().tolist() == [[0, 0], reference(matrix, unit)]
    assert copied.run().tolist() == [[0, 0], reference(matrix, unit)]


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_sums_are_the_same_however_many_threads_share_a_table(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setattr(tables, "_SHARED_BYTES", 0)
    monkeypatch.setattr(tables, "CACHED_BYTES", 4096)
    monkeypatch.setenv(ENV_HOST_THREADS, threads)
    tensors = [numbers((rows, 96), torch.bfloat16, seed=rows, shift=rows % 2) for rows in (1, 40, 333)]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    table = CopySumTable.build(
        [
            (tensor, whole(tensor), copy, whole(copy), source, whole(tensor), 4)
            for source, (tensor, copy) in enumerate(zip(tensors, copies, strict=True))
        ],
        sources=len(tensors),
    )
    for _ in range(2):
        assert table.run().tolist() == [reference(tensor, 4) for tensor in tensors]
    pairs = zip(copies, tensors, strict=True)
    assert all(torch.equal(copy.view(torch.int16), tensor.view(torch.int16)) for copy, tensor in pairs)


@pytest.mark.parametrize("elements", [2, 50_000, 131_072 + 6])
def test_words_of_four_bytes_over_a_whole_tensor_are_the_words_of_the_stream_digest(elements: int) -> None:
    tensor = numbers((elements,), torch.bfloat16, seed=elements)
    stream = StreamDigest()
    stream.update("w", tensor)
    first, second = sums_of(tensor, 4)
    line = f"w bfloat16 [{elements}] {first} {second}\n"
    assert hashlib.sha256(line.encode()).hexdigest() == stream.hexdigest()


@pytest.mark.parametrize("extreme", [2**31 - 1, -(2**31)])
def test_sums_wrap_at_64_bits_as_plain_integers_say(extreme: int) -> None:
    tensor = torch.full((150_000,), extreme, dtype=torch.int32)
    assert sums_of(tensor, 4) == reference(tensor, 4)


@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4])
def test_words_count_the_same_wherever_memory_begins(unit: int, shift: int) -> None:
    tensor = numbers((240,), torch.uint8, seed=3)
    moved = torch.zeros(248, dtype=torch.uint8)
    moved[shift : shift + 240] = tensor
    assert sums_of(moved[shift : shift + 240], unit) == reference(tensor, unit)


def test_the_same_bytes_give_the_same_digest_however_ranks_share_them() -> None:
    matrix = numbers((64, 128), torch.bfloat16, seed=1)
    by_one = SumTable.build([(matrix, whole(matrix), 0, whole(matrix), 4)], sources=1).run()
    by_two = torch.zeros(1, 2, dtype=torch.int64)
    for rank in range(2):
        columns = matrix[:, 64 * rank : 64 * rank + 64].contiguous()
        SumTable.build([(columns, whole(columns), 0, Block(64 * rank, 64, 64, 128), 4)], sources=1).run(by_two)
    assert sums_digest("layout", by_one) == sums_digest("layout", by_two)


def swap_two(tensor: "torch.Tensor") -> None:
    tensor[[3, 900]] = tensor[[900, 3]]


def shift_a_block(tensor: "torch.Tensor") -> None:
    tensor[200:300] = tensor[202:302].clone()


def keep_old(tensor: "torch.Tensor") -> None:
    tensor[512:1024] = numbers((1024,), torch.bfloat16, seed=6)[512:]


def flip_a_bit(tensor: "torch.Tensor") -> None:
    tensor.view(torch.int16)[777] ^= 1 << 9


@pytest.mark.parametrize("damage", [swap_two, shift_a_block, keep_old, flip_a_bit])
def test_damage_changes_the_digest(damage) -> None:
    tensor = numbers((1024,), torch.bfloat16, seed=5)
    table = SumTable.build([(tensor, whole(tensor), 0, whole(tensor), 4)], sources=1)
    before = sums_digest("layout", table.run())
    assert sums_digest("layout", table.run()) == before
    damage(tensor)
    assert sums_digest("layout", table.run()) != before


def test_two_tensors_that_changed_places_change_the_digest() -> None:
    tensors = [numbers((64,), torch.bfloat16, seed=seed) for seed in range(2)]
    digests = {
        sums_digest(
            "layout",
            SumTable.build(
                [(tensor, whole(tensor), source, whole(tensor), 4) for source, tensor in enumerate(order)], sources=2
            ).run(),
        )
        for order in (tensors, tensors[::-1])
    }
    assert len(digests) == 2


def test_a_copy_with_sums_copies_and_sums_what_the_target_then_holds() -> None:
    source = numbers((96, 512), torch.bfloat16, seed=8)
    target = numbers((96, 300), torch.bfloat16, seed=9)
    margin = target[:, 256:].clone()
    place, slice_ = Block(0, 96, 256, 300), Block(256, 96, 256, 512)
    sums = CopySumTable.build([(source, slice_, target, place, 0, slice_, 4)], sources=1).run()
    assert torch.equal(target[:, :256].contiguous().view(torch.int16), source[:, 256:].contiguous().view(torch.int16))
    assert torch.equal(target[:, 256:].contiguous().view(torch.int16), margin.view(torch.int16))
    assert torch.equal(sums, SumTable.build([(target, place, 0, slice_, 4)], sources=1).run())


def test_it_runs_as_kernels_in_the_interpreter_and_as_torch_otherwise() -> None:
    tensor = torch.arange(8)
    table = SumTable.build([(tensor, whole(tensor), 0, whole(tensor), 4)], sources=1)
    assert (len(table._launches), len(table._strips)) == ((1, 0) if INTERPRETED else (0, 1))


def test_sums_are_added_to_what_is_given_and_fresh_otherwise() -> None:
    tensor = torch.tensor([1, 2, 3], dtype=torch.int32)
    table = SumTable.build([(tensor, whole(tensor), 0, whole(tensor), 4)], sources=2)
    assert table.run().tolist() == table.run().tolist() == [[6, 14], [0, 0]]
    given_sums = torch.tensor([[1, 1], [5, 5]])
    assert table.run(given_sums) is given_sums
    assert given_sums.tolist() == [[7, 15], [5, 5]]
    assert SumTable.build([], sources=2).run().tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("block", "source", "place", "unit", "text"),
    [
        (
            Block(0, 1, 6, 6),
            0,
            Block(1, 1, 6, 6),
            4,
            "words of 4 bytes do not divide .* smaller unit for source tensor 0",
        ),
        (Block(0, 2, 3, 6), 0, Block(0, 1, 6, 6), 4, "words of 4 bytes do not divide"),
        (Block(0, 2, 2, 6), 0, Block(0, 2, 2, 5), 4, "words of 4 bytes do not divide"),
        (Block(0, 1, 6, 6), 1, Block(0, 1, 6, 6), 4, "there is no source tensor 1 among 1"),
        (Block(0, 1, 6, 6), -1, Block(0, 1, 6, 6), 4, "there is no source tensor -1 among 1"),
        (Block(0, 1, 6, 6), 0, Block(0, 1, 6, 6), 8, "words of 8 bytes; a word has 4, 2, 1"),
        (Block(0, 1, 6, 6), 0, Block(0, 1, 5, 5), 2, "has not the 6 elements"),
        (Block(7, 1, 6, 6), 0, Block(0, 1, 6, 6), 2, "ends at element 13 of a tensor of 12"),
    ],
)
def test_it_refuses_entries_that_cannot_be_summed(block, source, place, unit, text: str) -> None:
    tensor = torch.zeros(12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"entry 0: .*{text}"):
        SumTable.build([(tensor, block, source, place, unit)], sources=1)


def test_the_digest_is_sha256_over_the_layout_and_the_little_endian_sums() -> None:
    sums = torch.tensor([[1, -2], [2**62, -(2**63)]])
    table = b"".join(number.to_bytes(8, "little", signed=True) for number in (1, -2, 2**62, -(2**63)))
    assert sums_digest("ab12", sums) == hashlib.sha256(b"rolloutfleet sums 1 ab12 2\n" + table).hexdigest()
