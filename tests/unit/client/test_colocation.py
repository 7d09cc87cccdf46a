"""What trainer ranks show in shared memory is derived alike on both sides, and every part of a program is found in it."""

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from rolloutfleet.colocation import Showcase, ShownPiece, await_exports
from rolloutfleet.contract.trainer import TrainerPrepare, TrainerSend
from rolloutfleet.delivery import Cargo, Seat
from rolloutfleet.delivery_memory import SharedDelivery
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings, Piece
from rolloutfleet.layout.layout import Layout, Parameter, Placement
from rolloutfleet.rank import TrainerRank
from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.sources import source_of
from rolloutfleet.transport.exchange import publish_layout
from rolloutfleet.transport.memory import Exporter, Mapper
from rolloutfleet.transport.store import SessionStore, host_store

SECONDS = 20.0


@pytest.fixture
def store() -> SessionStore:
    return host_store(hold_listening_socket("127.0.0.1"), SECONDS)


def layout(dtype: str, *sources: int) -> Layout:
    placements = tuple(
        Placement(source, Block.contiguous(0, 8), 0, Block.contiguous(8 * index, 8))
        for index, source in enumerate(sources)
    )
    return Layout("manifest", (Parameter("flat", dtype, 8 * len(sources)),), placements, (), "shape")


def test_a_piece_is_shown_once_in_each_type_that_a_layout_takes() -> None:
    rows, columns = Block.contiguous(0, 4), Block(1, 2, 2, 4)
    holdings = Holdings(1, (Piece(0, rows), Piece(1, columns), Piece(2, rows)))
    showcase = Showcase([layout("float32", 0), layout("bfloat16", 0, 1)], holdings)
    assert showcase.pieces == (
        ShownPiece(0, rows, "bfloat16"),
        ShownPiece(0, rows, "float32"),
        ShownPiece(1, columns, "bfloat16"),
    )


def test_a_part_is_found_in_the_flat_piece_that_has_it() -> None:
    showcase = Showcase(
        [layout("float32", 0)], Holdings(0, (Piece(0, Block(1, 2, 2, 4)), Piece(0, Block.contiguous(3, 1))))
    )
    assert showcase.find(0, Block(2, 2, 1, 4), "float32") == (0, ((Block(2, 2, 1, 4), Block(1, 2, 1, 2)),))
    with pytest.raises(ValueError, match=r"trainer rank 0 shows no piece that has Block.* of tensor 0 as float32"):
        showcase.find(0, Block.contiguous(0, 2), "float32")
    with pytest.raises(ValueError, match="of tensor 0 as float16"):
        showcase.find(0, Block(1, 2, 2, 4), "float16")


def test_what_a_session_s_store_holds_does_not_grow_by_refits(store: SessionStore) -> None:
    tensors = {"w": torch.zeros(8)}
    source = source_of(tensors, team=True)
    manifest = source.manifest()
    cargo = Cargo(source, manifest, manifest.digest(), 1)
    place = Placement(0, Block.contiguous(0, 8), 0, Block.contiguous(0, 8))
    taken = Layout(cargo.digest, (Parameter("flat", "float32", 8),), (place,), (), "shape")
    publish_layout(store, taken)
    deliveries = []
    for rank in range(2):
        seat = TrainerRank(Seat(store=store, session="s", rank=rank, ranks=2, gpu=None))
        seat.load(cargo)
        deliveries.append(SharedDelivery(seat.seat, 1))
    order = TrainerPrepare(epoch=1, layouts=(taken.digest,), deadline_seconds=SECONDS)
    for delivery in deliveries:
        delivery.prepare(order, cargo, threading.Event())
    keys = []
    for version in range(1, 6):
        tensors["w"].fill_(version)
        for delivery in reversed(deliveries):
            delivery.send(TrainerSend(epoch=1, deadline_seconds=SECONDS), replace(cargo, version=version))
        assert len(await_exports(store, 1, version, 2, time.monotonic() + SECONDS)) == 2
        keys.append(store.store.num_keys())
    assert keys == [keys[0]] * 5
    for delivery in deliveries:
        delivery.end("over")


def test_memory_of_which_the_workers_were_not_told_is_told_of_again(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cargo_of(tensor: torch.Tensor, version: int) -> Cargo:
        source = source_of({"w": tensor}, team=True)
        manifest = source.manifest()
        return Cargo(source, manifest, manifest.digest(), version)

    first = cargo_of(torch.zeros(8), 1)
    place = Placement(0, Block.contiguous(0, 8), 0, Block.contiguous(0, 8))
    taken = Layout(first.digest, (Parameter("flat", "float32", 8),), (place,), (), "shape")
    publish_layout(store, taken)
    rank = TrainerRank(Seat(store=store, session="s", rank=0, ranks=1, gpu=None))
    rank.load(first)
    delivery = SharedDelivery(rank.seat, 1)
    delivery.prepare(
        TrainerPrepare(epoch=1, layouts=(taken.digest,), deadline_seconds=SECONDS), first, threading.Event()
    )
    order = TrainerSend(epoch=1, deadline_seconds=SECONDS)
    mapper = Mapper(torch.device("cpu"))

    def seen(version: int) -> list[float]:
        (message,) = await_exports(store, 1, version, 1, time.monotonic() + SECONDS)
        return mapper.map(message)[0].tolist()

    digest = delivery.send(order, first).digests[taken.digest]
    moved = cargo_of(torch.ones(8), 2)
    moved.source.bind(moved.manifest)
    with monkeypatch.context() as patch:
        patch.setattr(Exporter, "aim", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            delivery.aim(moved)
        with pytest.raises(ConnectionError, match="has not prepared"):
            delivery.send(order, moved)
    delivery.aim(moved)
    assert delivery.send(order, moved).digests[taken.digest] != digest
    assert seen(2) == [1.0] * 8
    delivery.end("over")
    mapper.close()


def test_what_is_shown_does_not_keep_the_trainers_tensors(store: SessionStore) -> None:
    tensors = {"w": torch.ones(8), "master": torch.ones(8)}
    source = source_of(tensors, team=True)
    manifest = source.manifest()
    cargo = Cargo(source, manifest, manifest.digest(), 1)
    whole = Block.contiguous(0, 8)
    taken = Layout(
        cargo.digest,
        (Parameter("flat", "float32", 8), Parameter("half", "bfloat16", 8)),
        (Placement(0, whole, 0, whole), Placement(1, whole, 1, whole)),
        (),
        "shape",
    )
    publish_layout(store, taken)
    rank = TrainerRank(Seat(store=store, session="s", rank=0, ranks=1, gpu=None))
    rank.load(cargo)
    delivery = SharedDelivery(rank.seat, 1)
    order = TrainerPrepare(epoch=1, layouts=(taken.digest,), deadline_seconds=SECONDS)
    delivery.prepare(order, cargo, threading.Event())
    delivery.send(TrainerSend(epoch=1, deadline_seconds=SECONDS), cargo)
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    tensors.clear()
    del source, cargo
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    delivery.end("over")
