"""One rank's part in an epoch: the session's store, and the group that moves weights, where the wire has one."""

import threading
from dataclasses import dataclass
from typing import Any

import torch

from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet.transport.store import SessionStore, breaking_off, connect_store
from rolloutfleet_worker.rank.link import RankError, is_cut_off
from rolloutfleet_worker.wire import Frame


@dataclass(frozen=True, slots=True)
class Membership:
    """A joined epoch."""

    epoch: int
    transport: Transport
    store: SessionStore
    group: Any
    """None where weights are read from shared memory."""
    rank: int
    trainer_ranks: int

    def abort(self) -> None:
        """Whatever a thread waits for in this membership raises, even where the trainer that hosts the store has fallen silent."""
        if self.group is not None:
            self.group.abort()
        self.store.break_off()


def join_epoch(body: Frame, local_rank: int, device: torch.device, cancelled: threading.Event) -> Membership:
    """The epoch's membership, as the commanded rank, which must be the offset plus this process's own.

    Raises:
        RankError: the rank is another, or the group did not form.
    """
    rank = body["rank_offset"] + local_rank
    if body["rank"] != rank:
        raise RankError(
            f"ordered to join as rank {body['rank']}, but offset {body['rank_offset']} and local rank {local_rank} give {rank}"
        )
    rendezvous = Rendezvous.model_validate(body["rendezvous"])
    timeout = float(body["timeout_seconds"])
    transport, wire = Transport(body["transport"]), Wire(body["wire"])
    try:
        with breaking_off(rendezvous.host, rendezvous.port, cancelled):
            store = connect_store(rendezvous.host, rendezvous.port, timeout, cancelled)
            group = _form(transport, wire, store, body, rank, device, timeout, cancelled)
    except (OSError, RuntimeError, TimeoutError, ValueError) as error:
        message = f"rank {rank} could not join at {rendezvous.host}:{rendezvous.port}: {error}"
        raise RankError(message, cut_off=is_cut_off(error)) from error
    return Membership(body["epoch"], transport, store, group, rank, body["trainer_ranks"])


def _form(
    transport: Transport,
    wire: Wire,
    store: SessionStore,
    body: Frame,
    rank: int,
    device: torch.device,
    timeout: float,
    cancelled: threading.Event,
) -> Any:
    epoch, world_size = body["epoch"], body["world_size"]
    if wire is Wire.MEMORY:
        return None
    if transport is Transport.NATIVE:
        from rolloutfleet.transport import native

        return native.form_group(store, epoch, rank, world_size, device, timeout, cancelled)
    from rolloutfleet.transport.group import form_group

    group = form_group(wire, store, epoch, rank, world_size, device, timeout, cancelled)
    if wire is Wire.GLOO and device.type != "cpu":
        from rolloutfleet.transport.bridging import HostBridge

        return HostBridge(group, device)
    return group
