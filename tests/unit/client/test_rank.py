"""What a trainer rank tells the workers of its holdings, and what it does in the epochs of a session."""

import sys
import threading
from types import SimpleNamespace

import pytest

from fakes.team import FakeSource
from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.trainer import TrainerJoin, TrainerSend
from rolloutfleet.delivery import Cargo, Seat, Sent
from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.rank import TrainerRank


class Delivery:
    """Notes how it ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.aims: list[Cargo] = []

    def aim(self, cargo: Cargo, /) -> None:
        self.aims.append(cargo)

    def send(self, order, cargo, /) -> Sent:
        return Sent(1, 2, {"": "digest"})

    def end(self, reason: str) -> None:
        self.ends.append(reason)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Holdings]:
    found: list[Holdings] = []
    monkeypatch.setattr(TrainerRank, "_publish", lambda rank, cargo, holdings: found.append(holdings))
    return found


def rank_of_two() -> TrainerRank:
    return TrainerRank(Seat(store=None, session="s", rank=1, ranks=2, gpu=None))


def cargo_of(source: FakeSource, version: int = 1) -> Cargo:
    manifest = source.manifest()
    return Cargo(source, manifest, manifest.digest(), version)


def join_order(epoch: int) -> TrainerJoin:
    return TrainerJoin(
        epoch=epoch, transport=Transport.LAYOUT, wire=Wire.GLOO, trainer_ranks=2, world_size=3, deadline_seconds=5
    )


def test_holdings_are_told_once_for_a_manifest_and_again_for_another(published: list[Holdings]) -> None:
    rank = rank_of_two()
    assert [rank.load(cargo_of(FakeSource(*names))) for names in ("a", "a", "ab", "a")] == [False] * 4
    assert [len(holdings.pieces) for holdings in published] == [1, 2, 1]


def test_holdings_that_changed_under_one_manifest_are_reported(published: list[Holdings]) -> None:
    rank = rank_of_two()
    assert rank.load(cargo_of(FakeSource("a"))) is False
    assert rank.load(cargo_of(FakeSource("a", held=False))) is True
    assert [len(holdings.pieces) for holdings in published] == [1, 0]


def test_an_order_of_an_epoch_that_the_rank_is_not_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = Delivery()
    monkeypatch.setattr("rolloutfleet.rank.join_epoch", lambda *_: delivery)
    rank, cargo, cancelled = rank_of_two(), cargo_of(FakeSource("a")), threading.Event()
    with pytest.raises(ConnectionError, match="told to act in epoch 3, but this trainer rank is in no group"):
        rank.perform(TrainerSend(epoch=3, deadline_seconds=5), cargo, cancelled)
    rank.perform(join_order(3), cargo, cancelled)
    assert rank.perform(TrainerSend(epoch=3, deadline_seconds=5), cargo, cancelled) == Sent(1, 2, {"": "digest"})
    with pytest.raises(ConnectionError, match="told to act in epoch 4, but this trainer rank is in epoch 3"):
        rank.perform(TrainerSend(epoch=4, deadline_seconds=5), cargo, cancelled)


def test_a_new_epoch_ends_the_former_group_and_a_cancelled_one_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Delivery] = []
    monkeypatch.setattr("rolloutfleet.rank.join_epoch", lambda *_: made.append(Delivery()) or made[-1])
    rank, cargo, cancelled = rank_of_two(), cargo_of(FakeSource("a")), threading.Event()
    rank.perform(join_order(1), cargo, cancelled)
    rank.perform(join_order(2), cargo, cancelled)
    assert made[0].ends == ["a new epoch begins"]
    cancelled.set()
    rank.perform(join_order(3), cargo, cancelled)
    assert made[2].ends == ["the refit ended while the group was forming"]
    rank.leave("done")
    rank.leave("done again")
    assert [delivery.ends for delivery in made[1:]] == [
        ["a new epoch begins"],
        ["the refit ended while the group was forming"],
    ]


def test_a_delivery_is_aimed_when_a_refit_is_asked_for_unless_its_plan_is_void(
    monkeypatch: pytest.MonkeyPatch, published: list[Holdings]
) -> None:
    delivery = Delivery()
    monkeypatch.setattr("rolloutfleet.rank.join_epoch", lambda *_: delivery)
    rank, first, second = rank_of_two(), cargo_of(FakeSource("a")), cargo_of(FakeSource("a"), 2)
    rank.load(first)
    rank.perform(join_order(1), first, threading.Event())
    assert delivery.aims == []
    rank.load(second)
    assert delivery.aims == [second]
    assert rank.load(cargo_of(FakeSource("a", held=False), 3)) is True
    assert delivery.aims == [second]


class Stream:
    """A CUDA stream of a device that notes when it is waited for."""

    def __init__(self, waits: list[str], name: str) -> None:
        self._waits, self._name = waits, name

    def synchronize(self) -> None:
        self._waits.append(self._name)


def test_what_the_caller_has_queued_on_streams_of_its_own_is_done_before_weights_are_taken(
    monkeypatch: pytest.MonkeyPatch, published: list[Holdings]
) -> None:
    waits: list[str] = []
    default, other = Stream(waits, "default"), Stream(waits, "the caller's on GPU 1")
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_stream=lambda device: other if device == 1 else default,
        default_stream=lambda device: default,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    rank_of_two().load(cargo_of(FakeSource("a")))
    assert waits == ["the caller's on GPU 1"]
    cuda.is_initialized = lambda: False
    rank_of_two().load(cargo_of(FakeSource("a")))
    assert len(waits) == 1
