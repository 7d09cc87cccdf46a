"""Copies out of the host's memory give the bytes and sums that copies within one device give. Both sides lie on the CPU here."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.tiles import crossing  # noqa: E402
from rolloutfleet.tiles.crossing import CrossingTable, copy_sum_table, steps_of  # noqa: E402
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
    across_table = CrossingTable([entry(source, across, pair)], 1, CPU)
    for _ in range(2):
        assert torch.equal(across_table.run(), table.run())
        assert torch.equal(across, within)
        assert across.any()
        source.mul_(-1.5)


def test_sums_are_added_to_those_that_are_given():
    source, target = torch.arange(1000).to(torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    table = CrossingTable([entry(source, target, "run to run")], 1, CPU)
    once = table.run()
    assert torch.equal(table.run(once.clone()), once * 2)


def test_sources_on_the_targets_device_take_the_faster_table():
    source, target = torch.arange(1000).to(torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    assert isinstance(copy_sum_table([entry(source, target, "run to run")], 1, CPU), CopySumTable)


@pytest.mark.parametrize("chunk", [1, 6, 100, 1 << 20])
@pytest.mark.parametrize("pair", PAIRS)
def test_short_steps_move_and_sum_the_same(monkeypatch: pytest.MonkeyPatch, pair: str, chunk: int):
    monkeypatch.setattr(crossing, "STEP_BYTES", 200)
    source = torch.arange(1000).to(torch.bfloat16)
    at_once, in_steps = torch.zeros(700, dtype=torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    expected = CrossingTable([entry(source, at_once, pair)], 1, CPU).run()
    table = CrossingTable([entry(source, in_steps, pair)], 1, CPU, chunk)
    sums = torch.zeros_like(expected)
    for step in steps_of(table):
        assert not sums.any()
        step.run(sums)
    assert torch.equal(sums, expected)
    assert torch.equal(in_steps, at_once)
    assert sum(step.nbytes for step in steps_of(table)) == table.nbytes


def test_beside_an_engine_that_decodes_no_copy_is_long_and_few_are_queued_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crossing, "STEP_BYTES", 200)
    copied: list[list[int]] = []
    copy = torch._foreach_copy_

    def noted(targets, sources, **options):
        copied.append([target.nbytes for target in targets])
        copy(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    source, target = torch.arange(1000).to(torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    CrossingTable([entry(source, target, "run to run")], 1, CPU, 64).run()
    assert copied == [[64] * 3] * 4 + [[32]]
    assert len(steps_of(CrossingTable([entry(source, target, "run to run")], 1, CPU))) == 1


def test_a_table_within_one_device_is_one_step():
    source, target = torch.arange(1000).to(torch.bfloat16), torch.zeros(700, dtype=torch.bfloat16)
    table = copy_sum_table([entry(source, target, "run to run")], 1, CPU, beside=True)
    (step,) = steps_of(table)
    sums = torch.zeros(1, 2, dtype=torch.int64)
    step.run(sums)
    assert step.nbytes == table.nbytes == 800
    assert torch.equal(sums, table.run())
