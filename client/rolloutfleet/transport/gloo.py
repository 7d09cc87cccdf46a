"""Groups over TCP with torch.distributed's gloo, for engines on CPUs. Trainer and workers use the same functions.

What ends a broadcast early was measured with torch 2.13 on Linux, 256 MiB from rank 0 to a peer on the same machine:

========================================  =====================================================================
peer killed                               both ends raise within 0.05 s ("Connection closed by peer")
peer stopped (SIGSTOP), or never calls    the other end blocks until the timeout of the operation, then raises on time
``ProcessGroupGloo.abort`` / ``shutdown``  return at once and unblock nothing
shutting down the group's TCP sockets     the blocked call raises within 0.05 s, here and at every other member
``work.wait(timeout)``                    raises on time, but the operation goes on in gloo's thread and keeps the tensor
========================================  =====================================================================

So every operation carries a timeout, and :meth:`Group.abort` shuts down the sockets (:mod:`rolloutfleet.transport.sockets`). gloo would
take the interface of this machine's host name; a device made from the address that routes to the trainer is used instead.
"""

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

from rolloutfleet.transport.sockets import Endpoint, end_connections, listening_endpoints
from rolloutfleet.transport.store import SessionStore, await_value, connect_store, gather_members, host_store, publish

if TYPE_CHECKING:
    import torch

__all__ = ["Group", "connect_store", "form_group", "host_store"]


class Group:
    """A formed group of one epoch; one thread broadcasts, any thread may abort."""

    def __init__(
        self,
        process_group: ProcessGroupGloo,
        listeners: set[Endpoint],
        *,
        epoch: int,
        rank: int,
        world_size: int,
        timeout: float,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._process_group: ProcessGroupGloo | None = process_group
        self._listeners = listeners
        self._ended = ""

    def broadcast_from_zero(self, tensor: "torch.Tensor", timeout: float | None = None) -> None:
        """Sends the tensor from rank 0, or receives into it; it must be contiguous and live on the CPU.

        On rank 0 the return means that the bytes have left this process, not that they arrived. Raises TimeoutError after
        ``timeout`` seconds (None: as many as the group had for forming), ConnectionAbortedError when :meth:`abort` was called,
        ConnectionError when a member is lost. The group is then useless.
        """
        process_group = self._process_group
        if process_group is None:
            raise ConnectionAbortedError(f"the group of epoch {self.epoch} has ended: {self._ended}")
        timeout = self.timeout if timeout is None else timeout
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout, 0.001))
        try:
            process_group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise self._explain(error, timeout) from error

    def abort(self, reason: str = "aborted") -> None:
        """Ends the group now; a broadcast blocked in another thread raises at once, here and at the other members."""
        self._end(reason)

    def close(self) -> None:
        """Leaves the group; members that still wait in it see a lost connection."""
        self._end("closed")

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._process_group = None
        end_connections(self._listeners)

    def _explain(self, error: RuntimeError, timeout: float) -> OSError:
        where = f"broadcast in epoch {self.epoch} at rank {self.rank} of {self.world_size}"
        if self._ended:
            return ConnectionAbortedError(f"{where} was aborted: {self._ended}")
        if "timed out" in str(error).lower():
            return TimeoutError(f"{where} did not end within {timeout:.1f} s: a member has stopped or is too slow")
        return ConnectionError(f"{where} lost a member: {error}")


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
    try:
        process_group = ProcessGroupGloo(PrefixStore("gloo", shared), rank, world_size, options)
    except RuntimeError as error:
        end_connections(listeners)
        raise ConnectionError(
            f"epoch {epoch} did not form at rank {rank} of {world_size}: all members arrived, but their connections failed; "
            f"check that every member reaches every other one, this one listens on {store.address} ({error})"
        ) from error
    return Group(process_group, listeners, epoch=epoch, rank=rank, world_size=world_size, timeout=timeout)


def _parse_listeners(value: bytes) -> Iterator[Endpoint]:
    for address, port in json.loads(value):
        yield str(address), int(port)
