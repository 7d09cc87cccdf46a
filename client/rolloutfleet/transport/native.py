"""vLLM's packed NCCL broadcast, for engines on GPUs. Trainer and workers form the group with the same function.

Rank 0 mints the NCCL unique id and publishes it in the session's store under ``epoch-<n>/nccl-id``; every rank then joins with
vLLM's unique-id rendezvous, once all have arrived, because ``ncclCommInitRank`` cannot be interrupted.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.transport.store import SessionStore, await_value, gather_members, publish

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

PACKED_BUFFER_BYTES: Final = 256 << 20
"""Size of the packed buffers; trainer and workers cut the stream at the same places only if they agree on it."""

PACKED_BUFFERS: Final = 2

UNIQUE_ID_KEY: Final = "nccl-id"


class Group:
    """An NCCL communicator of one epoch; any thread may abort it."""

    def __init__(self, communicator: "PyNcclCommunicator", *, epoch: int, rank: int, world_size: int) -> None:
        self.communicator = communicator
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self._ended = ""
        self._lock = threading.Lock()

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Broadcasts the tensors from rank 0 and returns when all have left the device.

        Tensors elsewhere are copied to the communicator's device first. Raises ConnectionAbortedError when the group was aborted.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        device = self.communicator.device
        with torch.accelerator.device_index(device.index):
            # The packing streams do not wait for the stream on which the trainer computed its weights.
            torch.cuda.current_stream().synchronize()
            try:
                packed_nccl_broadcast_producer(
                    tensors,
                    self.communicator,
                    src=0,
                    post_iter_func=lambda named: named[1].to(device),
                    buffer_size_bytes=PACKED_BUFFER_BYTES,
                    num_buffers=PACKED_BUFFERS,
                )
            except RuntimeError as error:
                self.raise_if_ended()
                raise ConnectionError(f"sending in epoch {self.epoch} failed: {error}") from error
        self.raise_if_ended()

    def abort(self, reason: str = "aborted") -> None:
        """Aborts the communicator (``ncclCommAbort``); collectives in flight end on this rank."""
        with self._lock:
            if not self._ended:
                self._ended = reason
                self.communicator.destroy()

    def close(self) -> None:
        """Leaves the group."""
        self.abort("closed")

    def raise_if_ended(self) -> None:
        """Raises ConnectionAbortedError when the group was aborted or closed."""
        if self._ended:
            raise ConnectionAbortedError(f"the group of epoch {self.epoch} has ended: {self._ended}")


def form_group(
    store: SessionStore,
    epoch: int,
    rank: int,
    world_size: int,
    device: "torch.device | int",
    timeout: float,
    cancelled: threading.Event | None = None,
) -> Group:
    """The group of an epoch, once all ``world_size`` ranks have called this within ``timeout`` seconds.

    Raises what :func:`rolloutfleet.transport.store.gather_members` raises, and ImportError when vLLM is not installed. Once every
    rank has arrived, NCCL's own initialisation follows, which ``timeout`` does not bound: call this in a thread.
    """
    wrapper, join = _vllm()
    deadline = time.monotonic() + timeout
    cancelled = cancelled or threading.Event()
    shared = store.of_epoch(epoch)
    if rank == 0:
        publish(shared, UNIQUE_ID_KEY, bytes(wrapper.NCCLLibrary().ncclGetUniqueId().internal))
    gather_members(shared, epoch, rank, world_size, deadline, cancelled)
    unique_id = await_value(shared, UNIQUE_ID_KEY, deadline, cancelled)
    communicator = join(
        unique_id, rank, world_size, torch.device("cuda", device) if isinstance(device, int) else device
    )
    return Group(communicator, epoch=epoch, rank=rank, world_size=world_size)


def receive(
    group: Group,
    manifest: Manifest,
    device: torch.device,
    take: Callable[[Sequence[tuple[str, torch.Tensor]]], None],
) -> None:
    """Receives the manifest's tensors from rank 0 and gives them to ``take`` a buffer at a time, on the stream they arrived on.

    Every buffer is fresh, so its tensors may be kept. Raises ConnectionAbortedError when the group was aborted.
    """
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    expected = ((spec.name, (list(spec.shape), getattr(torch, spec.dtype))) for spec in manifest.tensors)
    with torch.accelerator.device_index(device.index):
        packed_nccl_broadcast_consumer(
            expected,
            group.communicator,
            src=0,
            post_unpack_func=take,
            buffer_size_bytes=PACKED_BUFFER_BYTES,
            num_buffers=PACKED_BUFFERS,
            device=device,
        )
    group.raise_if_ended()


def _vllm() -> tuple[Any, Any]:
    try:
        from vllm.distributed.device_communicators import pynccl_wrapper
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
    except ImportError as error:
        raise ImportError(
            "refits over NCCL (transport Native) use vLLM's communicator, and vLLM is not installed here; install the vLLM release "
            "of the engines beside the trainer, or set spec.refit.transport to Gloo"
        ) from error
    return pynccl_wrapper, uid_init_process_group
