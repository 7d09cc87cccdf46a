"""What trainer and workers of one machine agree on when weights are read from shared memory: which tensors are shown, in which order,
and under which keys of the session's store. Both sides derive it from the layouts and the holdings."""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolloutfleet.layout.blocks import Block, overlap
from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.layout.layout import Layout
from rolloutfleet.transport.store import SessionStore, await_value, publish


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """A piece of a source tensor that a trainer rank shows, flat, in one dtype."""

    source: int
    block: Block
    dtype: str


class Showcase:
    """All that one trainer rank shows, in the order of its message: each piece that it holds, in each dtype that a layout takes."""

    def __init__(self, layouts: Iterable[Layout], holdings: Holdings) -> None:
        wanted: dict[int, set[str]] = {}
        for layout in layouts:
            for placement in layout.placements:
                wanted.setdefault(placement.source, set()).add(layout.parameters[placement.parameter].dtype)
        self.rank = holdings.rank
        self.pieces = tuple(
            ShownPiece(piece.source, piece.block, dtype)
            for piece in holdings.pieces
            for dtype in sorted(wanted.get(piece.source, ()))
        )
        self._places: dict[tuple[int, str], list[int]] = {}
        for index, piece in enumerate(self.pieces):
            self._places.setdefault((piece.source, piece.dtype), []).append(index)

    def find(self, source: int, block: Block, dtype: str) -> tuple[int, tuple[tuple[Block, Block], ...]]:
        """The index of the piece that has all of a block, and pairs: parts of the block in its order, and where they lie in the piece.

        Raises ValueError when no piece has all of it.
        """
        for index in self._places.get((source, dtype), ()):
            pairs = overlap(self.pieces[index].block, block)
            if sum(part.elements for part, _ in pairs) == block.elements:
                return index, pairs
        raise ValueError(f"trainer rank {self.rank} shows no piece that has {block} of tensor {source} as {dtype}")


def publish_memory(store: SessionStore, epoch: int, rank: int, message: bytes, former: str = "") -> str:
    """Tells the workers where a trainer rank's tensors lie; the name of that message, by which each version refers to it.

    ``former`` is the name of the rank's message before, which is removed: nobody reads it any more.
    """
    name = _name_of(message)
    shared = store.of_epoch(epoch)
    if name != former:
        publish(shared, f"memory/{rank}/{name}", message)
        if former:
            shared.delete_key(f"memory/{rank}/{former}")
    return name


def publish_export(
    store: SessionStore, epoch: int, version: int, rank: int, name: str, former: int | None = None
) -> None:
    """Makes known that a version's values lie where the rank's message of that name says.

    ``former`` is the version that was made known before, whose word is removed: every worker has answered for it.
    """
    shared = store.of_epoch(epoch)
    publish(shared, f"export/{version}/{rank}", name.encode())
    if former not in {None, version}:
        shared.delete_key(f"export/{former}/{rank}")


def await_exports(
    store: SessionStore,
    epoch: int,
    version: int,
    trainer_ranks: int,
    deadline: float,
    cancelled: threading.Event | None = None,
    known: Iterable[bytes] = (),
) -> tuple[bytes, ...]:
    """Every trainer rank's message, by rank; those that are ``known`` are not read again.

    Raises as :func:`rolloutfleet.transport.store.await_value`.
    """
    cancelled = cancelled or threading.Event()
    shared = store.of_epoch(epoch)
    read = {_name_of(message): message for message in known}
    found: list[bytes] = []
    for rank, word in enumerate(
        _await_all(store, epoch, f"export/{version}", range(trainer_ranks), deadline, cancelled)
    ):
        name = word.decode()
        found.append(read.get(name) or await_value(shared, f"memory/{rank}/{name}", deadline, cancelled))
    return tuple(found)


def publish_sums(store: SessionStore, epoch: int, version: int, rank: int, sums: bytes) -> None:
    """Gives trainer rank 0 the sums of what another trainer rank shows."""
    publish(store.of_epoch(epoch), f"sums/{version}/{rank}", sums)


def await_sums(store: SessionStore, epoch: int, version: int, trainer_ranks: int, deadline: float) -> tuple[bytes, ...]:
    """The other trainer ranks' sums, by rank, which are removed; raises as :func:`rolloutfleet.transport.store.await_value`."""
    sums = _await_all(store, epoch, f"sums/{version}", range(1, trainer_ranks), deadline, None)
    for rank in range(1, trainer_ranks):
        store.of_epoch(epoch).delete_key(f"sums/{version}/{rank}")
    return sums


def _name_of(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def _await_all(
    store: SessionStore,
    epoch: int,
    prefix: str,
    ranks: Sequence[int],
    deadline: float,
    cancelled: threading.Event | None,
) -> tuple[bytes, ...]:
    shared = store.of_epoch(epoch)
    return tuple(await_value(shared, f"{prefix}/{rank}", deadline, cancelled or threading.Event()) for rank in ranks)
