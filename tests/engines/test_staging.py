"""The second buffer of one rank, without an engine around it."""

import pytest
import torch

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout import Block, Layout, Parameter, Placement, build_layout
from rolloutfleet_worker.rank import staging
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.staging import Staging

CPU = torch.device("cpu")
MANIFEST = Manifest(
    tensors=(
        TensorSpec(name="q", dtype="bfloat16", shape=(4, 6)),
        TensorSpec(name="k", dtype="bfloat16", shape=(2, 6)),
        TensorSpec(name="half", dtype="float32", shape=(4, 8)),
    )
)


def layout_of(detours: dict[int, str] | None = None) -> Layout:
    detours = detours or {}
    placements = [
        Placement(0, Block.contiguous(0, 24), 0, Block.contiguous(0, 24)),
        Placement(1, Block.contiguous(0, 12), 0, Block.contiguous(24, 12)),
        # Columns 4 to 7 of every row, into a parameter with a row of padding at its end.
        Placement(2, Block(4, 4, 4, 8), 1, Block.contiguous(0, 16)),
    ]
    parameters = [Parameter("qk", "bfloat16", 36), Parameter("half", "float32", 20)]
    return build_layout(MANIFEST, parameters, [p for p in placements if p.source not in detours], detours, "shape")


def live() -> dict[str, torch.Tensor]:
    return {"qk": torch.zeros(36, dtype=torch.bfloat16), "half": torch.full((20,), 7.0)}


def test_what_is_staged_reaches_the_live_weights_only_when_it_is_copied_in():
    weights = live()
    buffer = Staging(layout_of(), weights, CPU)
    buffer.destinations["qk"].copy_(torch.arange(36))
    buffer.destinations["half"].copy_(torch.arange(20))
    assert not weights["qk"].any()
    buffer.copy_into_live()
    assert weights["qk"].tolist() == list(range(36))
    assert weights["half"].tolist() == [*range(16), 7, 7, 7, 7]


def test_a_buffer_that_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(staging, "room_bytes", lambda device: 500)
    with pytest.raises(RankError, match=r"a second buffer needs 0\.00 GB, 0\.00 GB are free on cpu; give vLLM less"):
        Staging(layout_of(), live(), CPU)


def test_a_version_of_which_something_takes_the_detour_cannot_be_staged():
    with pytest.raises(
        RankError, match=r"cannot be staged while tensors go through vLLM's loader: half: a kernel packs it"
    ):
        Staging(layout_of({2: "a kernel packs it"}), live(), CPU)


def test_a_buffer_is_used_again_for_the_same_layout_and_addresses_alone():
    weights = live()
    buffer = Staging(layout_of(), weights, CPU)
    assert buffer.fits(layout_of(), weights)
    assert not buffer.fits(layout_of(), weights | {"half": torch.zeros(20)})
    assert not buffer.fits(layout_of({2: "a kernel packs it"}), weights)


def test_neighbours_are_copied_together():
    assert staging._placed_runs(layout_of()) == [("qk", Block.contiguous(0, 36)), ("half", Block.contiguous(0, 16))]
