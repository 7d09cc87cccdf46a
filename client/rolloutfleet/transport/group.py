"""What every wire offers: the members of one epoch, connected, sending each other flat tensors."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from rolloutfleet.contract.policy import Wire

if TYPE_CHECKING:
    import torch

    from rolloutfleet.transport.store import SessionStore


class Group(Protocol):
    """A formed group of one epoch; one thread moves tensors through it, any thread may abort it.

    Tensors are contiguous and lie on :attr:`device`. On NCCL an operation is queued on the current CUDA stream and the call returns;
    its bytes have moved once :meth:`synchronize` has returned. On gloo the call returns when the tensor may be used again. Deadlines
    are times of ``time.monotonic``. Every method that moves tensors raises ConnectionAbortedError when the group was aborted,
    ConnectionError when a member is lost, and TimeoutError at the deadline; after any of them the group is useless.
    """

    epoch: int
    rank: int
    world_size: int
    device: "torch.device"

    def send(self, tensor: "torch.Tensor", to: int, deadline: float) -> None:
        """Sends the tensor to one rank, which must receive as many bytes; messages of a pair of ranks arrive in order."""
        ...

    def receive(self, tensor: "torch.Tensor", frm: int, deadline: float) -> None:
        """Receives from one rank into the tensor."""
        ...

    def broadcast(self, tensor: "torch.Tensor", root: int, deadline: float) -> None:
        """Sends the tensor from ``root`` to every other rank, which receive into it."""
        ...

    def grouped(self, deadline: float) -> AbstractContextManager[None]:
        """Operations inside are begun together, so that none of them waits for another; they count as one when the block ends."""
        ...

    def synchronize(self, deadline: float) -> None:
        """Returns when everything that was queued on the current stream is done; does nothing on gloo."""
        ...

    def raise_if_ended(self) -> None:
        """Raises ConnectionAbortedError when the group was aborted or closed, ConnectionError when it is known to be broken."""
        ...

    def abort(self, reason: str = "aborted") -> None:
        """Ends the group now; whatever another thread is blocked in raises, here and at the other members."""
        ...

    def close(self) -> None:
        """Leaves the group; members that still wait in it see a lost connection."""
        ...


def form_group(
    wire: Wire,
    store: "SessionStore",
    epoch: int,
    rank: int,
    world_size: int,
    device: "torch.device",
    timeout: float,
    cancelled: threading.Event | None = None,
) -> Group:
    """The group of an epoch over a wire, once all ``world_size`` ranks have called this within ``timeout`` seconds.

    Raises what :func:`rolloutfleet.transport.store.gather_members` raises. On NCCL the library's own start follows when every rank has
    arrived; it cannot be interrupted, so call this in a thread. Raises ValueError for :attr:`Wire.MEMORY`, which has no group.
    """
    if wire is Wire.GLOO:
        from rolloutfleet.transport.gloo import form_group as form_gloo

        return form_gloo(store, epoch, rank, world_size, timeout, cancelled)
    if wire is Wire.NCCL:
        from rolloutfleet.transport.nccl import form_group as form_nccl

        return form_nccl(store, epoch, rank, world_size, device, timeout, cancelled)
    raise ValueError(f"wire {wire} has no group: tensors are read from shared memory")


class MemberGone(ConnectionError):  # noqa: N818 - reads as what happened
    """The connection to a member ended without a word: its process is gone, or its machine."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@contextmanager
def ending_on_failure(group: Group) -> Iterator[None]:
    """Ends the group when the block fails, so that no other member waits for what this one will not do."""
    try:
        yield
    except BaseException as error:
        group.abort(f"{type(error).__name__}: {error}")
        raise


def seconds_left(deadline: float) -> float:
    """Seconds until a time of ``time.monotonic``, at least a millisecond, as waiting functions want them."""
    return max(deadline - time.monotonic(), 0.001)


__all__ = ["Group", "MemberGone", "ending_on_failure", "form_group", "seconds_left"]
