"""A group over TCP for a member whose tensors lie on a GPU: bytes pass through pinned memory of its host.

For trainers that have no GPU, such as a checkpoint's: NCCL cannot join those. The others in the group need not know who has such a bridge.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rolloutfleet.transport.group import Group


class HostBridge:
    """The same group (:class:`~rolloutfleet.transport.group.Group`) for tensors on ``device``.

    What is sent is copied when it is sent, after all that the current stream had been given before; what is received has been copied to the
    device when the call, or the grouped block, ends.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.epoch = group.epoch
        self.rank = group.rank
        self.world_size = group.world_size
        self.device = device
        self._group = group
        self._landing: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._leaving: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, to: int, deadline: float) -> None:
        """Sends what the tensor holds now."""
        self._group.send(self._copy_out(tensor), to, deadline)

    def receive(self, tensor: torch.Tensor, frm: int, deadline: float) -> None:
        """Receives into the tensor."""
        host = self._host_buffer(tensor)
        self._group.receive(host, frm, deadline)
        self._land(tensor, host)

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: float) -> None:
        """Sends from the root, receives elsewhere."""
        if root == self.rank:
            self._group.broadcast(self._copy_out(tensor), root, deadline)
            return
        host = self._host_buffer(tensor)
        self._group.broadcast(host, root, deadline)
        self._land(tensor, host)

    @contextmanager
    def grouped(self, deadline: float) -> Iterator[None]:
        """Operations inside are begun at once; what they bring is on the device when the block ends."""
        landing = self._landing = []
        try:
            with self._group.grouped(deadline):
                yield
            for tensor, host in landing:
                tensor.copy_(host)
        finally:
            self._landing = None
            self._leaving.clear()

    def synchronize(self, deadline: float) -> None:
        """Returns when the current stream has done what it was given."""
        self._group.synchronize(deadline)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def raise_if_ended(self) -> None:
        self._group.raise_if_ended()

    def abort(self, reason: str = "aborted") -> None:
        self._group.abort(reason)

    def close(self) -> None:
        self._group.close()

    def _copy_out(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self._host_buffer(tensor)
        host.copy_(tensor)
        if self._landing is not None:
            self._leaving.append(host)  # gloo reads it until the block ends
        return host

    def _host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")

    def _land(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        if self._landing is None:
            tensor.copy_(host)
        else:
            self._landing.append((tensor, host))
