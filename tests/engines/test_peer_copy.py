"""What comes from a peer beside the live weights of one rank, without an engine around it."""

import pytest
import torch

from rolloutfleet_worker.rank import peer_copy
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.peer_copy import PeerCopy, copy_bytes

CPU = torch.device("cpu")


def live() -> list[tuple[str, torch.Tensor]]:
    return [
        ("matrix", torch.zeros(3, 5)),
        ("scalar", torch.tensor(7.0)),
        ("small", torch.zeros(3, dtype=torch.uint8)),
        ("turned", torch.zeros(4, 6, dtype=torch.bfloat16).t()),
    ]


def test_a_copy_reaches_the_live_tensors_only_when_it_is_copied_in():
    weights = live()
    beside = PeerCopy(weights, CPU)
    wanted = {name: torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype) for name, tensor in weights}
    for name, tensor in beside.tensors.items():
        tensor.copy_(wanted[name])
    assert not any(tensor.any() for name, tensor in weights if name != "scalar")
    beside.copy_into_live()
    for name, tensor in weights:
        assert torch.equal(tensor, wanted[name]), name
        copy = beside.tensors[name]
        assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def test_a_copy_that_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_copy, "room_bytes", lambda device: copy_bytes(live()) - 1)
    with pytest.raises(RankError, match=r"a second copy of the weights needs 0\.00 GB, 0\.00 GB are free on cpu"):
        PeerCopy(live(), CPU)
