"""Copying all that a rank computes with to the rank of the same number of another engine, in the kernels' own format."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from rolloutfleet.contract.policy import Wire
from rolloutfleet.transport.group import Group, form_group
from rolloutfleet.transport.store import SessionStore, await_value, publish

LENDER, BORROWER = 0, 1
CHUNK_BYTES: Final = 64 << 20


class Pair:
    """The lender's and the borrower's rank of one number; any thread may end it, and ``cancelled`` does so from the beginning."""

    def __init__(
        self, store: SessionStore, local_rank: int, side: int, cancelled: threading.Event | None = None
    ) -> None:
        self._store = store
        self._rank = local_rank
        self._side = side
        self._group: Group | None = None
        self.cancelled = cancelled or threading.Event()
        """Set once the pair has been ended."""
        self._guard = threading.Lock()

    def form(self, wire: Wire, device: torch.device, deadline: float) -> Group:
        """The group of the two; raises what :func:`rolloutfleet.transport.group.form_group` raises."""
        # Each pair meets in a part of the store of its own: what is an epoch elsewhere is a local rank here.
        timeout = max(deadline - time.monotonic(), 0.001)
        group = form_group(wire, self._store, self._rank, self._side, 2, device, timeout, self.cancelled)
        with self._guard:
            self._group = group
        if self.cancelled.is_set():
            group.abort()
            raise ConnectionAbortedError(f"the pair of local rank {self._rank} was ended")
        return group

    def end(self, reason: str) -> None:
        """Ends the pair now, whatever either side waits for."""
        self.cancelled.set()
        with self._guard:
            group, self._group = self._group, None
        if group is not None:
            group.abort(reason)

    def publish_digest(self, digest: str) -> None:
        publish(self._store.of_epoch(self._rank), "live", digest.encode())

    def await_digest(self, deadline: float) -> str:
        """The lender's live digest; raises what :func:`rolloutfleet.transport.store.await_value` raises."""
        return await_value(self._store.of_epoch(self._rank), "live", deadline, self.cancelled).decode()


def lend(
    pair: Pair, tensors: Sequence[torch.Tensor], digest: str, wire: Wire, device: torch.device, deadline: float
) -> None:
    """Sends every tensor, once the borrower has come; raises what the group raises."""
    pair.publish_digest(digest)
    group = pair.form(wire, device, deadline)
    for chunks in _in_groups(tensors):
        with group.grouped(deadline):
            for chunk in chunks:
                group.send(chunk, BORROWER, deadline)
    group.synchronize(deadline)
    # The last bytes may still be under way: the borrower says when it has them.
    group.receive(torch.empty(1, dtype=torch.uint8, device=device), BORROWER, deadline)
    group.synchronize(deadline)
    group.close()


def borrow(pair: Pair, tensors: Sequence[torch.Tensor], wire: Wire, device: torch.device, deadline: float) -> int:
    """Overwrites every tensor with the lender's; the bytes that came. Raises what the group raises, half way then."""
    group = pair.form(wire, device, deadline)
    nbytes = 0
    for chunks in _in_groups(tensors):
        with group.grouped(deadline):
            for chunk in chunks:
                group.receive(chunk, LENDER, deadline)
                nbytes += chunk.numel()
    group.synchronize(deadline)
    group.send(torch.ones(1, dtype=torch.uint8, device=device), LENDER, deadline)
    group.synchronize(deadline)
    group.close()
    return nbytes


def _in_groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors as runs of bytes, cut and collected to some 64 MiB each."""
    group: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        for chunk in bytes_of(tensor).split(CHUNK_BYTES):
            if group and filled + chunk.numel() > CHUNK_BYTES:
                yield group
                group, filled = [], 0
            group.append(chunk)
            filled += chunk.numel()
    if group:
        yield group


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, flat; one whose dimensions are merely permuted has no gaps."""
    dense = tensor.detach()
    if not dense.is_contiguous():
        dense = dense.permute(sorted(range(dense.dim()), key=lambda axis: -dense.stride(axis)))
    if not dense.is_contiguous():
        raise ValueError(
            f"a live tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())} has gaps and cannot be copied as it lies"
        )
    return dense.reshape(-1).view(torch.uint8)
