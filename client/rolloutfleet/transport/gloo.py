"""Groups over TCP with torch.distributed's gloo, for engines on CPUs. Trainer and workers use the same functions.

What ends an operation early was measured with torch 2.13 on Linux, 256 MiB from rank 0 to a peer on the same machine, as a broadcast
and from one rank to another:

========================================  =====================================================================
peer killed                               both ends raise within 0.05 s ("Connection closed by peer")
peer stopped (SIGSTOP), or never calls    the other end blocks until the timeout of the operation, then raises on time
``ProcessGroupGloo.abort`` / ``shutdown``  return at once and unblock nothing
shutting down the group's TCP sockets     the blocked call raises within 0.05 s, here and at every other member
peer killed while bytes go to it          the sender's ``work.wait`` never returns, not even when the sockets are shut down
``work.wait(timeout)``                    raises on time, but the operation goes on in gloo's thread and keeps the tensor
========================================  =====================================================================

So every operation carries a deadline, :meth:`Group.abort` shuts down the sockets (:mod:`rolloutfleet.transport.sockets`), operations are
waited for on a thread that may be left behind, and members watch each other (:mod:`rolloutfleet.transport.liveness`). gloo would take the
interface of this machine's host name; a device made from the address that routes to the trainer is used instead.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

import torch
from torch.distributed import BroadcastOptions, DistError, PrefixStore, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import Work

from rolloutfleet.exiting import start_thread
from rolloutfleet.transport.group import MemberGone, seconds_left
from rolloutfleet.transport.liveness import Watch, watch_members
from rolloutfleet.transport.sockets import Endpoint, end_connections, listening_endpoints
from rolloutfleet.transport.store import SessionStore, await_value, connect_store, gather_members, host_store, publish

__all__ = ["Group", "connect_store", "form_group", "host_store"]

_CONNECTING_POLL_SECONDS: Final = 0.02

LATE_SECONDS: Final = 1.0
"""What a member sent before it left is still received for so long."""


class Group:
    """A formed group of one epoch (:class:`rolloutfleet.transport.group.Group`); one thread moves tensors, any thread may abort."""

    def __init__(
        self,
        process_group: ProcessGroupGloo,
        listeners: set[Endpoint],
        watch: Watch,
        *,
        epoch: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self._process_group: ProcessGroupGloo | None = process_group
        self._listeners = listeners
        self._watch = watch
        self._ended = ""
        self._lost = False
        self._gone: int | None = None
        """The member whose connection ended without a word."""
        self._ending = threading.Lock()
        self._over: Future[None] = Future()
        self._waiter = _Waiter(lambda: self._end("the process ends"))
        self._pending: list[Work] | None = None
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        watch.start(self._lose)

    def send(self, tensor: torch.Tensor, to: int, deadline: float) -> None:
        """Sends a contiguous CPU tensor to one rank; the return means that the bytes have left, not that they arrived."""
        # gloo delivers messages of one tag in any order when several are under way.
        self._sent[to] += 1
        self._run("sending", lambda group: group.send([tensor], to, self._sent[to]), deadline)

    def receive(self, tensor: torch.Tensor, frm: int, deadline: float) -> None:
        """Receives from one rank into a contiguous CPU tensor of as many bytes as that rank sends."""
        self._received[frm] += 1
        self._run("receiving", lambda group: group.recv([tensor], frm, self._received[frm]), deadline)

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Sends the tensor from ``root`` or receives into it; at the root the return means that the bytes have left."""
        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = timedelta(seconds=seconds_left(deadline))
        self._run("a broadcast", lambda group: group.broadcast([tensor], options), deadline)

    @contextmanager
    def grouped(self, deadline: float) -> Iterator[None]:
        """Operations inside are begun at once and awaited when the block ends."""
        self._pending = []
        try:
            yield
            for work in self._pending:
                self._await("sending and receiving", work, deadline)
        finally:
            self._pending = None

    def synchronize(self, deadline: float) -> None:  # noqa: ARG002 - the wire that waits here has one
        """Nothing is left to wait for: every operation has ended when its call returns."""
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raises ConnectionAbortedError when the group was aborted or closed, ConnectionError when a member is lost."""
        if self._lost:
            raise self._loss(f"the group of epoch {self.epoch} has lost a member: {self._ended}")
        if self._ended:
            raise ConnectionAbortedError(f"the group of epoch {self.epoch} has ended: {self._ended}")

    def abort(self, reason: str = "aborted") -> None:
        """Ends the group now; an operation blocked in another thread raises at once, here and at the other members."""
        self._end(reason)

    def close(self) -> None:
        """Leaves the group; members that still wait in it see a lost connection."""
        self._end("closed")

    def _lose(self, sentence: str, rank: int | None) -> None:
        self._gone = rank
        wait({self._over}, LATE_SECONDS)
        self._end(sentence, lost=True)

    def _loss(self, message: str) -> ConnectionError:
        return ConnectionError(message) if self._gone is None else MemberGone(message, self._gone)

    def _end(self, reason: str, *, lost: bool = False) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended, self._lost = reason, lost
        last, self._process_group = [self._process_group], None
        end_connections(self._listeners)
        self._watch.close("" if reason == "closed" else f"rank {self.rank} ended the group: {reason}")
        self._over.set_result(None)
        # Whoever lets go of gloo's group last waits for a send that hangs, until its deadline.
        start_thread("rolloutfleet-gloo-end", last.clear, lambda: None)
        self._waiter.close()

    def _run(self, what: str, begin: Callable[[ProcessGroupGloo], Work], deadline: float) -> None:
        self.raise_if_ended()
        process_group = self._process_group
        if process_group is None:
            raise ConnectionAbortedError(f"the group of epoch {self.epoch} is ending: {self._ended}")
        try:
            work = begin(process_group)
        except RuntimeError as error:
            raise self._explain(what, error, deadline) from error
        del process_group
        if self._pending is None:
            self._await(what, work, deadline)
        else:
            self._pending.append(work)

    def _await(self, what: str, work: Work, deadline: float) -> None:
        # A send under way to a peer that dies is never ended by gloo, not even when the sockets are shut down: its wait is left behind.
        waiting = self._waiter.wait(work, timedelta(seconds=seconds_left(deadline)))
        wait({waiting, self._over}, return_when=FIRST_COMPLETED)
        try:
            if waiting.done():
                waiting.result()
        except RuntimeError as error:
            raise self._explain(what, error, deadline) from error
        self.raise_if_ended()

    def _explain(self, what: str, error: RuntimeError, deadline: float) -> OSError:
        where = f"{what} in epoch {self.epoch} at rank {self.rank} of {self.world_size}"
        if self._lost:
            return self._loss(f"{where} lost a member: {self._ended}")
        if self._ended:
            return ConnectionAbortedError(f"{where} was aborted: {self._ended}")
        if time.monotonic() >= deadline or "timed out" in str(error).lower():
            return TimeoutError(f"{where} did not end in time: a member has stopped or is too slow")
        return self._loss(f"{where} lost a member: {error}")


class _Waiter:
    """A thread that waits for one operation after another, in place of one that must be free to leave."""

    def __init__(self, end: Callable[[], None]) -> None:
        """``end`` closes this, when the interpreter ends before anybody else has."""
        self._asked: SimpleQueue[tuple[Work, timedelta, Future[None]] | None] = SimpleQueue()
        self._last: Future[None] | None = None
        self._thread = start_thread("rolloutfleet-gloo", self._serve, end)

    def wait(self, work: Work, seconds: timedelta) -> "Future[None]":
        """Done when the work is; raises what the work's own wait raises."""
        done: Future[None] = Future()
        self._last = done
        self._asked.put((work, seconds, done))
        return done

    def close(self) -> None:
        """The thread ends once it has waited for what it was asked to."""
        self._asked.put(None)
        if self._last is None or self._last.done():
            self._thread.join()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, seconds, done = asked
            try:
                work.wait(seconds)
            except RuntimeError as error:
                done.set_exception(error)
            else:
                done.set_result(None)


def form_group(
    store: SessionStore,
    epoch: int,
    rank: int,
    world_size: int,
    timeout: float,
    cancelled: threading.Event | None = None,
) -> Group:
    """The group of an epoch, once all ``world_size`` ranks have called this within ``timeout`` seconds.

    Raises TimeoutError naming the ranks that are missing, ConnectionAbortedError soon after ``cancelled`` is set, ConnectionError when
    the store or a member is lost, ValueError for a rank that does not exist or that another process holds.
    """
    deadline = time.monotonic() + timeout
    cancelled = cancelled or threading.Event()
    shared = store.of_epoch(epoch)
    gather_members(shared, epoch, rank, world_size, deadline, cancelled)
    watch = watch_members(shared, store.address, rank, world_size, deadline, cancelled)
    try:
        process_group, listeners = _connect(store, shared, epoch, rank, world_size, deadline, cancelled, watch)
    except (OSError, DistError) as error:
        watch.close(f"rank {rank} did not connect: {error}")
        raise
    return Group(process_group, listeners, watch, epoch=epoch, rank=rank, world_size=world_size)


def _connect(
    store: SessionStore,
    shared: Store,
    epoch: int,
    rank: int,
    world_size: int,
    deadline: float,
    cancelled: threading.Event,
    watch: Watch,
) -> tuple[ProcessGroupGloo, set[Endpoint]]:
    """gloo's own group, and where its members listen."""
    before = listening_endpoints()
    device = ProcessGroupGloo.create_device(hostname=store.address)
    mine = sorted(endpoint for endpoint in listening_endpoints() - before if endpoint[0] == store.address)
    publish(shared, f"listener/{rank}", json.dumps(mine).encode())
    listeners = set(mine)
    for member in range(world_size):
        listeners |= set(_parse_listeners(await_value(shared, f"listener/{member}", deadline, cancelled)))
    options = ProcessGroupGloo._Options()
    options._devices = [device]
    options._threads = 1
    options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    made = _in_background(lambda: ProcessGroupGloo(PrefixStore("gloo", shared), rank, world_size, options))
    try:
        while not wait({made}, _CONNECTING_POLL_SECONDS).done:
            if cancelled.is_set():
                raise ConnectionAbortedError(f"connecting the members of epoch {epoch} was cancelled at rank {rank}")
            watch.raise_if_lost()
        return made.result(), listeners
    except RuntimeError as error:
        end_connections(listeners)
        raise ConnectionError(
            f"epoch {epoch} did not form at rank {rank} of {world_size}: all members arrived, but their connections failed; "
            f"check that every member reaches every other one, this one listens on {store.address} ({error})"
        ) from error
    except OSError:
        end_connections(listeners)
        raise


def _in_background(make: Callable[[], ProcessGroupGloo]) -> "Future[ProcessGroupGloo]":
    """What gloo makes: it waits for members that have died meanwhile until its own deadline, and can be left behind here."""
    made: Future[ProcessGroupGloo] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except RuntimeError as error:
            made.set_exception(error)

    start_thread("rolloutfleet-gloo-connect", run, lambda: None)
    return made


def _parse_listeners(value: bytes) -> Iterator[Endpoint]:
    for address, port in json.loads(value):
        yield str(address), int(port)
