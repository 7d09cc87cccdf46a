"""Copies out of the host's memory give the bytes and sums that copies within one device give. Both sides lie on the CPU here."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.tiles.crossing import CrossingTable, copy_sum_table  # noqa: E402
from rolloutfleet.tiles.digesting import CopySumEntry, CopySumTable  # noqa: E402

CPU = torch.device("cpu")
PAIRS = {
    "run to run": (Block(0, 1, 400, 400), Block(100, 1, 400, 400)),
    "rows to run": (Block(400, 10, 20, 40), Block(0, 1, 200, 200)),
    "run to rows": (Block(10, 1, 60, 60), Block(0, 6, 10, 20)),
    "rows to other rows": (Block(10, 4, 15, 40), Block(0, 6, 10, 20)),
}


def entry(source: "torch.Tensor", target: "torch.Tensor", pair: str) -> CopySumEntry:
    block, place = PAIRS[pair]
    return CopySumEntry(source, block, target, place, 0, Block(6, 1, block.elements, block.elements), 2)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_crossing_moves_and_sums_what_a_copy_within_a_device_does_however_often(pair: str):
    source = torch.arange(1000).to(torch.bfloat16)
    within, across = torch.zeros(700, dtype=torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    table = CopySumTable.build([entry(source, within, pair)], 1, CPU)
    crossing = CrossingTable([entry(source, across, pair)], 1, CPU)
    for _ in range(2):
        assert torch.equal(crossing.run(), table.run())
        assert torch.equal(across, within)
        assert across.any()
        source.mul_(-1.5)


def test_sums_are_added_to_those_that_are_given():
    source, target = torch.arange(1000).to(torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    crossing = CrossingTable([entry(source, target, "run to run")], 1, CPU)
    once = crossing.run()
    assert torch.equal(crossing.run(once.clone()), once * 2)


def test_sources_on_the_targets_device_take_the_faster_table():
    source, target = torch.arange(1000).to(torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    assert isinstance(copy_sum_table([entry(source, target, "run to run")], 1, CPU), CopySumTable)
