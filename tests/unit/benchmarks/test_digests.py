"""The switch that leaves sums out."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from benchmarks.digests import switch_digests  # noqa: E402

from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.tiles.digesting import CopySumTable, SumTable  # noqa: E402


@pytest.fixture(autouse=True)
def switched_back() -> Iterator[None]:
    yield
    switch_digests(on=True)


def test_without_sums_copies_are_made_all_the_same_and_sums_stay_zero():
    source, target = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    whole = Block.contiguous(0, 64)
    table = CopySumTable.build([(source, whole, target, whole, 0, whole, 4)], sources=1)
    switch_digests(on=False)
    assert table.run().tolist() == [[0, 0]]
    assert torch.equal(source, target)
    assert SumTable.build([(source, whole, 0, whole, 4)], sources=1).run().tolist() == [[0, 0]]


def test_switched_on_again_the_sums_are_there():
    source = torch.ones(8, dtype=torch.int32)
    table = SumTable.build([(source, Block.contiguous(0, 8), 0, Block.contiguous(0, 8), 4)], sources=1)
    switch_digests(on=False)
    switch_digests(on=True)
    assert table.run().tolist() == [[8, 36]]
