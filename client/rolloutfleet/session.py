"""A trainer's hold on a fleet: the lease, the store in which groups meet, and rank 0's seat in them."""

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from rolloutfleet.channel import Channel
from rolloutfleet.contract.environment import communication_environment
from rolloutfleet.contract.names import WORKER_CONTROL_PORT
from rolloutfleet.contract.trainer import FleetView, OpenSession, SessionView
from rolloutfleet.contract.worker import Locality, Rendezvous
from rolloutfleet.delivery import Seat
from rolloutfleet.devices import device_word, nccl_version, working_gpu
from rolloutfleet.errors import FleetUnreachable, InvalidRequest, RolloutFleetError, SessionLost
from rolloutfleet.locality import locality
from rolloutfleet.rank import TrainerRank
from rolloutfleet.routing import hold_listening_socket, local_address_towards, split_host_port

logger = logging.getLogger("rolloutfleet")

STORE_SECONDS: Final = 60.0


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


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a trainer rank's tensors lie."""

    device: str
    """GPU UUID, or ``cpu``."""
    locality: Locality


class Session:
    """An open session; a thread renews its lease until :meth:`close`."""

    def __init__(self, channel: Channel, rank: TrainerRank, rendezvous: Rendezvous, view: SessionView) -> None:
        self.id = view.session
        self.rank = rank
        """Rank 0 of the trainer."""
        self.rendezvous = rendezvous
        """Where the session's store is."""
        self._channel = channel
        self._lease_seconds = view.lease_seconds
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="rolloutfleet-lease", daemon=True)
        self._renewal.start()

    @property
    def usable(self) -> bool:
        """False once the lease was lost or the session closed."""
        return not (self._lost.is_set() or self._closed.is_set())

    def mark_lost(self) -> None:
        """Notes that the fleet no longer knows this session."""
        self._lost.set()

    def close(self) -> None:
        """Leaves the group, gives the fleet back and stops renewing; does nothing the second time."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.rank.leave("the session is closed")
        if self._lost.is_set():
            return
        try:
            self._channel.delete(f"sessions/{self.id}")
        except RolloutFleetError as error:
            logger.warning("session %s was not closed, its lease ends by itself: %s", self.id, error)

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


def place_of(gpu: int | None, shareable: bool = True) -> RankPlace:
    """The place of this process's tensors, which lie on that GPU, or for None in the host's memory; without a word for sharing what
    cannot be shared: CUDA's handles of that memory, or tensors of which the host holds a part at a time."""
    here, hidden = locality(), "memory" if gpu is None else "host"
    return RankPlace(device=device_word(gpu), locality=here if shareable else here.model_copy(update={hidden: ""}))


def open_session(
    channel: Channel,
    fleet: FleetView,
    identity: TrainerIdentity,
    gpu: int | None,
    shareable: bool,
    others: Sequence[RankPlace] = (),
) -> Session:
    """A session whose store already listens at the address that workers are told.

    ``gpu`` is the one on which this process's tensors lie, ``shareable`` whether CUDA can show them to other processes; ``others`` are
    the places of the trainer's further ranks. Raises SessionHeld when another trainer has the fleet, ImportError when torch is not
    installed, ValueError when the address to advertise is not one of this machine.
    """
    try:
        from rolloutfleet.transport.store import host_store
    except ImportError as error:
        raise ImportError(f"refitting sends torch tensors, and torch cannot be imported here: {error}") from error
    places = (place_of(gpu, shareable), *others)
    # Joining happens on another thread, where CUDA's current device would be the first one.
    gpu = working_gpu(gpu)
    listening = listen_for_workers(channel, fleet, identity.advertise)
    host, port = listening.getsockname()[:2]
    store = host_store(listening, STORE_SECONDS)
    request = OpenSession(
        trainer=identity.shown_name,
        rendezvous=Rendezvous(host=host, port=port),
        ranks=len(places),
        devices=tuple(place.device for place in places),
        locality=_shared(places),
        nccl_version=nccl_version(),
        environment=communication_environment(identity.environment),
        take_over=identity.take_over,
    )
    view = channel.post("sessions", request, SessionView)
    logger.info("session %s of fleet %s is open; workers meet at %s:%s", view.session, view.fleet.fleet, host, port)
    seat = Seat(store=store, session=view.session, rank=0, ranks=len(places), gpu=gpu)
    return Session(channel, TrainerRank(seat), request.rendezvous, view)


def _shared(places: Sequence[RankPlace]) -> Locality:
    """What all ranks have in common; empty words where they are apart."""
    hosts, memories = {place.locality.host for place in places}, {place.locality.memory for place in places}
    return Locality(host=hosts.pop() if len(hosts) == 1 else "", memory=memories.pop() if len(memories) == 1 else "")


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
