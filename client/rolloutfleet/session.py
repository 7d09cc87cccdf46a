"""A trainer's hold on a fleet: the lease, the store in which groups meet, and the group of the current epoch."""

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rolloutfleet.channel import Channel
from rolloutfleet.contract.environment import communication_environment
from rolloutfleet.contract.names import WORKER_CONTROL_PORT
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.trainer import FleetView, OpenSession, SessionView, TrainerJoin
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet.errors import FleetUnreachable, InvalidRequest, RolloutFleetError, SessionLost
from rolloutfleet.routing import hold_listening_socket, local_address_towards, split_host_port

if TYPE_CHECKING:
    from rolloutfleet.transport import gloo, native
    from rolloutfleet.transport.store import SessionStore

logger = logging.getLogger("rolloutfleet")

_STORE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TrainerIdentity:
    """How a trainer presents itself."""

    name: str = ""
    advertise: str | None = None
    take_over: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def shown_name(self) -> str:
        """The given name, or host and process."""
        return self.name or f"{socket.gethostname()}/{os.getpid()}"


class Session:
    """An open session; a thread renews its lease until :meth:`close`."""

    def __init__(self, channel: Channel, store: "SessionStore", view: SessionView) -> None:
        self.id = view.session
        self.transport = view.fleet.transport
        self.group: gloo.Group | native.Group | None = None
        self._channel = channel
        self._store = store
        # Joining happens on another thread, where CUDA's current device would be the first one.
        self._device = _current_cuda_device() if view.fleet.transport is Transport.NATIVE else None
        self._lease_seconds = view.lease_seconds
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._guard = threading.Lock()
        self._renewal = threading.Thread(target=self._renew, name="rolloutfleet-lease", daemon=True)
        self._renewal.start()

    @property
    def usable(self) -> bool:
        """False once the lease was lost or the session closed."""
        return not (self._lost.is_set() or self._closed.is_set())

    def mark_lost(self) -> None:
        """Notes that the fleet no longer knows this session."""
        self._lost.set()

    def join(self, order: TrainerJoin, cancelled: threading.Event) -> None:
        """Joins the group of a new epoch, leaving the former one; raises as the transport's ``form_group`` does."""
        self.leave("a new epoch begins")
        group = self._form(order, cancelled)
        with self._guard:
            if not cancelled.is_set():
                self.group = group
                return
        group.abort("the refit ended while the group was forming")

    def leave(self, reason: str) -> None:
        """Leaves the current group; whatever is blocked in it raises at once."""
        with self._guard:
            group, self.group = self.group, None
        if group is not None:
            group.abort(reason)

    def close(self) -> None:
        """Leaves the group, gives the fleet back and stops renewing; does nothing the second time."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.leave("the session is closed")
        if self._lost.is_set():
            return
        try:
            self._channel.delete(f"sessions/{self.id}")
        except RolloutFleetError as error:
            logger.warning("session %s was not closed, its lease ends by itself: %s", self.id, error)

    def _form(self, order: TrainerJoin, cancelled: threading.Event) -> "gloo.Group | native.Group":
        if self.transport is Transport.GLOO:
            from rolloutfleet.transport import gloo

            return gloo.form_group(
                self._store, order.epoch, order.rank, order.world_size, order.deadline_seconds, cancelled
            )
        from rolloutfleet.transport import native

        assert self._device is not None
        return native.form_group(
            self._store, order.epoch, order.rank, order.world_size, self._device, order.deadline_seconds, cancelled
        )

    def _renew(self) -> None:
        wait = renewed = self._lease_seconds / 3
        while not self._closed.wait(wait):
            started = time.monotonic()
            try:
                self._channel.post(f"sessions/{self.id}/renew", None, SessionView)
                wait = renewed
            except (SessionLost, InvalidRequest) as error:
                logger.warning("session %s is lost: %s", self.id, error)
                self._lost.set()
                return
            except RolloutFleetError as error:
                if self._closed.is_set():
                    return
                wait = max(0.2, renewed / 4 - (time.monotonic() - started))
                logger.warning("the lease of session %s was not renewed, trying again: %s", self.id, error)


def _current_cuda_device() -> int:
    """Index of the CUDA device that the calling thread uses."""
    import torch

    return int(torch.cuda.current_device())


def open_session(channel: Channel, fleet: FleetView, identity: TrainerIdentity) -> Session:
    """A session whose store already listens at the address that workers are told.

    Raises SessionHeld when another trainer has the fleet, ImportError when torch is not installed, ValueError when the address to
    advertise is not one of this machine.
    """
    try:
        from rolloutfleet.transport.store import host_store
    except ImportError as error:
        raise ImportError(f"refitting sends torch tensors, and torch cannot be imported here: {error}") from error
    listening = listen_for_workers(channel, fleet, identity.advertise)
    host, port = listening.getsockname()[:2]
    store = host_store(listening, _STORE_SECONDS)
    request = OpenSession(
        trainer=identity.shown_name,
        rendezvous=Rendezvous(host=host, port=port),
        nccl_version=_nccl_version() if fleet.transport is Transport.NATIVE else "",
        environment=communication_environment(identity.environment),
        take_over=identity.take_over,
    )
    view = channel.post("sessions", request, SessionView)
    logger.info("session %s of fleet %s is open; workers meet at %s:%s", view.session, view.fleet.fleet, host, port)
    return Session(channel, store, view)


def listen_for_workers(channel: Channel, fleet: FleetView, advertise: str | None) -> socket.socket:
    """A socket on the address that routes to the fleet's first member (to the sync job while there is none), or on ``advertise``."""
    if advertise is not None:
        host, port = split_host_port(advertise, 0)
        try:
            return hold_listening_socket(host, port)
        except OSError as error:
            raise ValueError(
                f"advertise={advertise!r} cannot be listened on: {error}. It must be an address of this machine that workers can reach"
            ) from error
    addresses = [member.address for member in fleet.members if member.address]
    url = urlsplit(channel.target.url)
    towards, port = split_host_port(addresses[0] if addresses else url.hostname or "", WORKER_CONTROL_PORT)
    try:
        return hold_listening_socket(local_address_towards(towards, port))
    except OSError as error:
        raise FleetUnreachable(
            f"no route from here to {towards} of fleet {fleet.fleet}: {error}. Run the trainer where pods are reachable, or pass advertise="
        ) from error


def _nccl_version() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "this fleet refits over NCCL (transport Native) and the trainer sees no GPU; run it on one, or use a fleet of transport Gloo"
        )
    return ".".join(map(str, torch.cuda.nccl.version()))
