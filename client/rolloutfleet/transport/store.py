"""The key-value store of a trainer's session: every epoch's group meets in it below its own prefix ``epoch-<n>``."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from rolloutfleet.exiting import start_thread
from rolloutfleet.routing import local_address_towards
from rolloutfleet.transport.sockets import end_connections

_POLL_SECONDS: Final = 0.02
_FIRST_POLL_SECONDS: Final = 0.0005
"""Engines may be paused while a member is waited for that will be there in a moment."""


@dataclass(frozen=True, slots=True)
class SessionStore:
    """An open store and the local address on which this process is reachable for the other members."""

    store: TCPStore
    address: str

    def of_epoch(self, epoch: int) -> Store:
        """The part of the store that belongs to one epoch."""
        return PrefixStore(f"epoch-{epoch}", self.store)

    def break_off(self) -> None:
        """Ends every connection of this process to the store, for good: a question that another thread has put to it raises now.

        For members alone, not for whoever hosts it. Nothing else ends a question to a host that has fallen silent without closing its
        connections, for torch waits without a deadline.
        """
        end_connections({(self.store.host, self.store.port)})


def host_store(listening: socket.socket, timeout: float) -> SessionStore:
    """The session's store, served on a listening socket that it takes over (the trainer's side)."""
    address, port = listening.getsockname()[:2]
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return SessionStore(store=store, address=address)


def connect_store(host: str, port: int, timeout: float, cancelled: threading.Event | None = None) -> SessionStore:
    """The session's store as a member reaches it; the local address is the one that routes towards ``host``.

    Raises ConnectionError when nothing answers there within ``timeout`` seconds, ConnectionAbortedError soon after ``cancelled`` is set.
    """
    try:
        address = local_address_towards(host, port)
        _await_listener(host, port, time.monotonic() + timeout, cancelled or threading.Event())
        store = _open(host, port, timeout, cancelled or threading.Event())
    except ConnectionAbortedError:
        raise
    except (DistError, OSError) as error:
        raise ConnectionError(
            f"the trainer's store at {host}:{port} was not reached within {timeout:g} s; "
            f"check that this address routes from here to the trainer, or set advertise= there ({error})"
        ) from error
    return SessionStore(store=store, address=address)


def _open(host: str, port: int, timeout: float, cancelled: threading.Event) -> TCPStore:
    """A client of the store. Torch asks a host that does not answer again and again, so a thread is left behind for that when cancelled."""
    opened: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            opened.set_result(
                TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
            )
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame; whoever waits raises it
            opened.set_exception(error)

    start_thread("rolloutfleet-store", connect, lambda: None)
    while not wait({opened}, _POLL_SECONDS).done:
        if cancelled.is_set():
            raise ConnectionAbortedError(f"reaching the trainer's store at {host}:{port} was cancelled")
    return opened.result()


def _await_listener(host: str, port: int, deadline: float, cancelled: threading.Event) -> None:
    """Torch logs a warning with each attempt of its own, so it is called only once somebody listens."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=min(1.0, max(deadline - time.monotonic(), 0.01))):
                return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        if cancelled.wait(_POLL_SECONDS):
            raise ConnectionAbortedError(f"reaching the trainer's store at {host}:{port} was cancelled")


@contextmanager
def breaking_off(host: str, port: int, cancelled: threading.Event) -> Iterator[None]:
    """In the block, ``cancelled`` ends every connection of this process to the store, those that are only being made among them."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            if cancelled.is_set():
                end_connections({(host, port)})

    watching = start_thread("rolloutfleet-store-watch", watch, over.set)
    try:
        yield
    finally:
        over.set()
        watching.join()


def gather_members(
    store: Store, epoch: int, rank: int, world_size: int, deadline: float, cancelled: threading.Event
) -> None:
    """Returns once every rank of the epoch has arrived.

    ``deadline`` is a time of ``time.monotonic``. Raises TimeoutError naming the ranks that did not come, ValueError when another process
    holds this rank, ConnectionAbortedError soon after ``cancelled`` is set, ConnectionError when the store is lost.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist in a world of {world_size}")
    keys = [f"present/{member}" for member in range(world_size)]
    what = f"joining epoch {epoch} as rank {rank}"
    try:
        if store.add(keys[rank], 1) != 1:
            raise ValueError(f"rank {rank} of epoch {epoch} was joined by two processes")
        if _await_keys(store, keys, what, deadline, cancelled):
            return
        missing = [str(member) for member, key in enumerate(keys) if not store.check([key])]
    except DistError as error:
        raise ConnectionError(f"lost the session's store while {what}: {error}") from error
    raise TimeoutError(f"epoch {epoch} did not form in time: no word from rank {', '.join(missing)} of {world_size}")


def publish(store: Store, key: str, value: bytes) -> None:
    """Makes a value visible to all members of the epoch."""
    store.set(key, value)


def await_value(store: Store, key: str, deadline: float, cancelled: threading.Event) -> bytes:
    """The value of a key once a member has published it; raises as :func:`gather_members` does."""
    what = f"waiting for {key}"
    try:
        if _await_keys(store, [key], what, deadline, cancelled):
            return bytes(store.get(key))
    except DistError as error:
        raise ConnectionError(f"lost the session's store while {what}: {error}") from error
    raise TimeoutError(f"no member published {key} in time")


def _await_keys(store: Store, keys: Sequence[str], what: str, deadline: float, cancelled: threading.Event) -> bool:
    # Store.wait would hold the client's lock, ignore cancellation and log a warning at each timeout.
    pause = _FIRST_POLL_SECONDS
    while not store.check(list(keys)):
        if time.monotonic() >= deadline:
            return False
        if cancelled.wait(pause):
            raise ConnectionAbortedError(f"{what} was cancelled")
        pause = min(pause * 1.25, _POLL_SECONDS)
    return True
