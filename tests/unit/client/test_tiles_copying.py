"""Copies by table against torch's own indexing. Runs where torch is installed: as torch code, and as kernels in Triton's interpreter."""

import os
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.tiles import tables  # noqa: E402
from rolloutfleet.tiles.copying import CopyTable  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = settings(
    max_examples=20 if INTERPRETED else 200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def indices(block: Block) -> list[int]:
    return [block.offset + row * block.stride + column for row in range(block.rows) for column in range(block.run)]


def whole(tensor: "torch.Tensor") -> Block:
    return Block(0, 1, tensor.numel(), tensor.numel())


def numbers(elements: int, dtype: "torch.dtype", seed: int, shift: int = 0) -> "torch.Tensor":
    """A tensor of arbitrary bits whose first element lies ``shift`` elements into its storage."""
    size = (elements + shift) * dtype.itemsize
    octets = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return octets.view(dtype)[shift:]


@st.composite
def blocks(draw, elements: int) -> Block:
    rows = draw(st.sampled_from([rows for rows in range(1, elements + 1) if elements % rows == 0]))
    run = elements // rows
    return Block(draw(st.integers(0, 9)), rows, run, run + draw(st.integers(0, 9)))


@st.composite
def copies(draw):
    entries = []
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    for seed in range(draw(st.integers(1, 4))):
        elements = draw(st.sampled_from([1, 7, 24, 36, 64, 96, 360]))
        source, target = draw(blocks(elements)), draw(blocks(elements))
        entries.append(
            (
                numbers(source.end + 3, dtype, 2 * seed, draw(st.integers(0, 3))),
                source,
                numbers(target.end + 3, dtype, 2 * seed + 1, draw(st.integers(0, 3))),
                target,
            )
        )
    return entries


@EXAMPLES
@given(copies(), st.sampled_from([32, 96, 1 << 16]))
def test_a_table_copies_what_indexing_copies_and_nothing_else(entries, tile_bytes: int) -> None:
    expected = []
    for source, block, target, place in entries:
        result = target.clone()
        result[indices(place)] = source[indices(block)]
        expected.append(result)
    with patch.object(tables, "TILE_BYTES", tile_bytes), patch.object(tables, "CACHED_BYTES", tile_bytes):
        CopyTable.build(entries).run()
    for (_, _, target, _), result in zip(entries, expected, strict=True):
        assert torch.equal(target.view(torch.uint8), result.view(torch.uint8))


@pytest.mark.parametrize("elements", [40_961, 98_304, 32_768 * 3 + 8])
def test_tensors_of_several_tiles_arrive_whole(elements: int) -> None:
    source, target = numbers(elements, torch.bfloat16, 1), torch.zeros(elements, dtype=torch.bfloat16)
    CopyTable.build([(source, whole(source), target, whole(target))]).run()
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))


def test_a_row_parallel_slice_is_gathered_from_its_columns() -> None:
    matrix, half = numbers(96 * 512, torch.bfloat16, 2).view(96, 512), torch.zeros(96, 256, dtype=torch.bfloat16)
    CopyTable.build([(matrix, Block(256, 96, 256, 512), half, whole(half))]).run()
    assert torch.equal(half.view(torch.int16), matrix[:, 256:].contiguous().view(torch.int16))


def test_it_runs_as_kernels_in_the_interpreter_and_as_torch_otherwise() -> None:
    source, target = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    table = CopyTable.build([(source, whole(source), target, whole(target))])
    assert tables.runs_kernels(torch.device("cpu")) is INTERPRETED
    assert (len(table._launches), len(table._strips)) == ((1, 0) if INTERPRETED else (0, 1))


def test_it_copies_what_sources_hold_when_it_runs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6))
    source = torch.arange(6.0)
    table = CopyTable.build([(source, whole(source), parameter, whole(parameter))])
    source += 10
    table.run()
    assert parameter.tolist() == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("source", "block", "target", "place", "text"),
    [
        (torch.zeros(8), Block(1, 1, 8, 8), torch.zeros(8), Block(0, 1, 8, 8), "ends at element 9 of a tensor of 8"),
        (torch.zeros(8), Block(0, 1, 8, 8), torch.zeros(8), Block(0, 2, 4, 5), "ends at element 9 of a tensor of 8"),
        (torch.zeros(8), Block(0, 1, 4, 4), torch.zeros(8), Block(0, 1, 8, 8), "has not the 4 elements"),
        (torch.zeros(8), Block(0, 1, 8, 8), torch.zeros(8).half(), Block(0, 1, 8, 8), "cast the source first"),
        (torch.zeros(4, 2).t(), Block(0, 1, 8, 8), torch.zeros(8), Block(0, 1, 8, 8), "contiguous tensor"),
    ],
)
def test_it_refuses_entries_that_would_touch_other_memory(source, block, target, place, text: str) -> None:
    good = torch.zeros(2)
    with pytest.raises(ValueError, match=f"entry 1: .*{text}"):
        CopyTable.build([(good, whole(good), torch.zeros(2), whole(good)), (source, block, target, place)])


def test_a_table_of_nothing_does_nothing() -> None:
    table = CopyTable.build([])
    table.run()
    assert table.nbytes == 0


def test_nineteen_thousand_placements_are_laid_out_within_a_second() -> None:
    """Generously, since CI machines are slow; on an idle machine it takes a third of that or less."""
    import time

    fused = torch.zeros(128 * 64)
    expert = torch.zeros(64)
    entries = [(expert, Block(0, 1, 64, 64), fused, Block(at % 128 * 64, 1, 64, 64)) for at in range(19_000)]
    started = time.process_time()
    CopyTable.build(entries)
    assert time.process_time() - started < 1
