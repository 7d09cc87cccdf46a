"""How one trainer rank gives its tensors to the workers of an epoch, by transport."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.trainer import TrainerJoin, TrainerPrepare, TrainerSend
from rolloutfleet.sources.source import WeightSource

if TYPE_CHECKING:
    from rolloutfleet.transport import native
    from rolloutfleet.transport.group import Group
    from rolloutfleet.transport.pushing import Pusher
    from rolloutfleet.transport.store import SessionStore


@dataclass(frozen=True, slots=True)
class Seat:
    """One process of a trainer in one session."""

    store: "SessionStore"
    session: str
    rank: int
    ranks: int
    gpu: int | None
    """Index of the GPU on which an NCCL group works."""


@dataclass(frozen=True, slots=True)
class Cargo:
    """What a refit sends: tensors bound to the manifest of the whole team."""

    source: WeightSource
    manifest: Manifest
    digest: str
    """The manifest's."""
    version: int
    repair: bool = False
    """The version is the fleet's already, and sent to engines that lack it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank has sent; on rank 0, what all of them have."""

    tensors: int
    nbytes: int
    digests: Mapping[str, str]
    """By layout; under an empty key for every worker rank."""


class Delivery(Protocol):
    """One rank's part in one epoch; one thread at a time works for it, any thread may end it."""

    def aim(self, cargo: Cargo) -> None:
        """Takes note of where the tensors of the next refit lie, if it is prepared for their manifest; else :meth:`prepare` will."""
        ...

    def prepare(self, order: TrainerPrepare, cargo: Cargo, cancelled: threading.Event) -> None:
        """Makes ready to send the cargo, and others of its manifest after it, to workers of these layouts."""
        ...

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        """Gives the workers the values that the cargo's tensors have now, where they lay when it was aimed at or prepared for.

        Engines may be paused: nothing but moving bytes is left to do. Raises ConnectionError when this manifest was not prepared, else
        as the transport does.
        """
        ...

    def end(self, reason: str) -> None:
        """Leaves the group; whatever is blocked in it raises at once."""
        ...


def join_epoch(order: TrainerJoin, seat: Seat, cancelled: threading.Event) -> Delivery:
    """The rank's part in a new epoch, once every member has joined within the order's deadline; raises as the transport does."""
    if order.wire is Wire.MEMORY:
        from rolloutfleet.delivery_memory import SharedDelivery

        return SharedDelivery(seat, order.epoch)
    import torch

    device = torch.device("cpu") if seat.gpu is None else torch.device("cuda", seat.gpu)
    place = (seat.store, order.epoch, seat.rank, order.world_size, device, order.deadline_seconds, cancelled)
    if order.transport is Transport.NATIVE:
        from rolloutfleet.transport import native

        return WholeDelivery(native.form_group(*place))
    from rolloutfleet.transport.group import form_group

    group = form_group(order.wire, *place)
    return WholeDelivery(group) if order.transport is Transport.GLOO else LayoutDelivery(seat, group)


class WholeDelivery:
    """Whole tensors, broadcast by rank 0 (transports Native and Gloo)."""

    def __init__(self, group: "Group | native.Group") -> None:
        self._group = group

    def aim(self, cargo: Cargo) -> None:
        """Nothing: tensors are taken one after another as they are sent."""
        del cargo

    def prepare(self, order: TrainerPrepare, cargo: Cargo, cancelled: threading.Event) -> None:
        """Nothing: the manifest says all."""
        del order, cargo, cancelled

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        from rolloutfleet.transport.sending import send

        digest = send(self._group, cargo.manifest, cargo.source, order.deadline_seconds)
        return Sent(digest.tensors, digest.nbytes, {"": digest.hexdigest()})

    def end(self, reason: str) -> None:
        self._group.abort(reason)


class LayoutDelivery:
    """Each worker rank's own slices, pushed by the trainer ranks that hold them (transport Layout)."""

    def __init__(self, seat: Seat, group: "Group") -> None:
        self._seat = seat
        self._group = group
        self._pusher: Pusher | None = None
        self._manifest = ""

    def aim(self, cargo: Cargo) -> None:
        if self._pusher is not None and cargo.digest == self._manifest:
            self._pusher.aim(cargo.source)

    def prepare(self, order: TrainerPrepare, cargo: Cargo, cancelled: threading.Event) -> None:
        from rolloutfleet.transport.exchange import await_holdings, await_layouts
        from rolloutfleet.transport.pushing import Pusher

        deadline = time.monotonic() + order.deadline_seconds
        layouts = await_layouts(self._seat.store, order.layouts, deadline, cancelled)
        holdings = await_holdings(self._seat.store, cargo.digest, self._seat.ranks, deadline, cancelled)
        by_rank = {rank: layouts[digest] for rank, digest in enumerate(order.layouts, self._seat.ranks)}
        pusher = Pusher(self._group, cargo.manifest, by_rank, holdings, deadline=deadline)
        pusher.aim(cargo.source)
        self._pusher, self._manifest = pusher, cargo.digest

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        if self._pusher is None or cargo.digest != self._manifest:
            raise ConnectionError(f"told to send in epoch {order.epoch} what this trainer rank has not prepared")
        pushed = self._pusher.push(cargo.source, time.monotonic() + order.deadline_seconds)
        return Sent(pushed.tensors, pushed.nbytes, pushed.digests)

    def end(self, reason: str) -> None:
        self._group.abort(reason)
