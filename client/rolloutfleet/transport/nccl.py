"""Groups over NCCL for GPUs, with torch alone: no vLLM on the trainer's side, no process group of torch on either.

Rank 0 mints the unique id and publishes it in the session's store under ``epoch-<n>/nccl-id``. ``ncclCommInitRank`` has no deadline and
cannot be interrupted, so every rank first shows that it is there (:mod:`rolloutfleet.transport.liveness`), and that connection stays: the
end of a member's process ends the group everywhere. Communicators are never split, since an abort does not reach what was split off.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

import torch

from rolloutfleet.transport.group import MemberGone
from rolloutfleet.transport.lanes import await_mark
from rolloutfleet.transport.libnccl import Communicator, Library, NcclError, find_library
from rolloutfleet.transport.liveness import Watch, watch_members
from rolloutfleet.transport.store import SessionStore, await_value, gather_members, publish

logger = logging.getLogger("rolloutfleet")

UNIQUE_ID_KEY: Final = "nccl-id"
ABORT_SECONDS: Final = 5.0
"""How long an abort is waited for; NCCL has releases in which it hangs, and then only the end of the process frees the GPU."""

_QUEUEING_SECONDS: Final = 1.0


class Group:
    """A formed group of one epoch (:class:`rolloutfleet.transport.group.Group`); one thread moves tensors, any thread may abort."""

    def __init__(
        self,
        library: Library,
        communicator: Communicator,
        watch: Watch,
        *,
        epoch: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._library = library
        self._communicator = communicator
        self._watch = watch
        self._ended = ""
        self._lost = ""
        self._gone: int | None = None
        """The member whose connection ended without a word."""
        self._ending = threading.Lock()
        # Held while the communicator is used; an abort frees it.
        self._using = threading.RLock()
        watch.start(self._lose)

    def send(self, tensor: torch.Tensor, to: int, deadline: float) -> None:
        """Queues the tensor for one rank."""
        with self._live(deadline) as communicator:
            self._library.send(communicator, *_memory(tensor), to, self._stream())

    def receive(self, tensor: torch.Tensor, frm: int, deadline: float) -> None:
        """Queues the arrival of as many bytes as the tensor has, from one rank."""
        with self._live(deadline) as communicator:
            self._library.receive(communicator, *_memory(tensor), frm, self._stream())

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Queues the tensor from ``root`` to all."""
        with self._live(deadline) as communicator:
            self._library.broadcast(communicator, *_memory(tensor), root, self._stream())

    @contextmanager
    def grouped(self, deadline: float) -> Iterator[None]:
        """Operations inside are one launch on the current stream."""
        with self._live(deadline) as communicator, self._library.grouped(communicator):
            yield

    def synchronize(self, deadline: float) -> None:
        """Returns when everything queued on the current stream is done; TimeoutError at the deadline."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        await_mark(event, self, deadline)

    def raise_if_ended(self) -> None:
        """Raises ConnectionAbortedError when the group was aborted or closed, ConnectionError when a member or NCCL itself is lost."""
        with self._live() as communicator:
            self._library.raise_async_error(communicator)

    def abort(self, reason: str = "aborted") -> None:
        """Aborts the communicator (``ncclCommAbort``): kernels that wait for a peer end, here and by the closed watch elsewhere.

        Returns after at most :data:`ABORT_SECONDS`, and logs when NCCL has not come back by then.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = reason
        self._watch.close("" if reason == "closed" else f"rank {self.rank} ended the group: {reason}")
        work = threading.Thread(target=self._free, name="rolloutfleet-nccl-abort", daemon=True)
        work.start()
        work.join(ABORT_SECONDS)
        if work.is_alive():
            logger.critical(
                "ncclCommAbort in epoch %s at rank %s has not returned after %g s; this process should be ended",
                self.epoch,
                self.rank,
                ABORT_SECONDS,
            )

    def close(self) -> None:
        """Leaves the group."""
        self.abort("closed")

    def _lose(self, sentence: str, rank: int | None) -> None:
        self._lost, self._gone = sentence, rank
        self.abort(sentence)

    def _free(self) -> None:
        # A thread that is stuck inside NCCL holds this for ever, and only the abort can free it.
        owned = self._using.acquire(timeout=_QUEUEING_SECONDS)
        try:
            with torch.cuda.device(self.device):
                self._library.abort(self._communicator)
        except NcclError:
            logger.exception("the group of epoch %s was not aborted cleanly at rank %s", self.epoch, self.rank)
        finally:
            if owned:
                self._using.release()

    @contextmanager
    def _live(self, deadline: float = math.inf) -> Iterator[Communicator]:
        with self._using:
            self._raise_ended()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"moving weights in epoch {self.epoch} at rank {self.rank} was not begun in time")
            try:
                yield self._communicator
            except NcclError:
                self._raise_ended()
                raise

    def _raise_ended(self) -> None:
        if self._lost:
            message = f"the group of epoch {self.epoch} has lost a member: {self._lost}"
            raise ConnectionError(message) if self._gone is None else MemberGone(message, self._gone)
        if self._ended:
            raise ConnectionAbortedError(f"the group of epoch {self.epoch} has ended: {self._ended}")

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)


def form_group(
    store: SessionStore,
    epoch: int,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: float,
    cancelled: threading.Event | None = None,
) -> Group:
    """The group of an epoch, once all ``world_size`` ranks have called this within ``timeout`` seconds.

    Raises what :func:`rolloutfleet.transport.store.gather_members` and :func:`watch_members` raise, OSError when there is no libnccl,
    ValueError for a device that is no GPU. NCCL's own start follows, which ``timeout`` does not bound: call this in a thread.
    """
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"NCCL moves tensors between GPUs, and device is {device}; it must be one such as cuda:0")
    library = open_library()
    deadline = time.monotonic() + timeout
    cancelled = cancelled or threading.Event()
    shared = store.of_epoch(epoch)
    if rank == 0:
        publish(shared, UNIQUE_ID_KEY, library.unique_id())
    gather_members(shared, epoch, rank, world_size, deadline, cancelled)
    unique_id = await_value(shared, UNIQUE_ID_KEY, deadline, cancelled)
    watch = watch_members(shared, store.address, rank, world_size, deadline, cancelled)
    try:
        with _shared_environment(), torch.cuda.device(device):
            communicator = library.init_rank(unique_id, rank, world_size)
    except NcclError:
        watch.close()
        raise
    group = Group(library, communicator, watch, epoch=epoch, rank=rank, world_size=world_size, device=device)
    try:
        _connect(group, deadline)
    except (OSError, RuntimeError) as error:
        group.abort(f"connecting failed: {error}")
        raise
    return group


@cache
def open_library() -> Library:
    """The libnccl that torch uses; OSError when there is none."""
    return Library(find_library())


def _connect(group: Group, deadline: float) -> None:
    """NCCL connects peers when they first meet, which would otherwise happen inside the first refit."""
    word = torch.zeros(16, dtype=torch.uint8, device=group.device)
    group.broadcast(word, 0, deadline)
    group.synchronize(deadline)


def _shared_environment() -> AbstractContextManager[Any]:
    """The environment that vLLM was started with: inside its processes vLLM sets NCCL variables that peers elsewhere do not have."""
    vllm = sys.modules.get("vllm.utils.nccl")
    return nullcontext() if vllm is None else vllm.unpinned_nccl_env()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is not contiguous; NCCL moves contiguous memory")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


__all__ = ["Group", "form_group", "open_library"]
