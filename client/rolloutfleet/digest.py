"""A digest of tensors that is the same on every device and cheap enough to take during a transfer.

A tensor's bytes are read as little-endian int32 words ``x_0, x_1, ...`` (the last one padded with zeros) and folded into two sums that
wrap at 64 bits: ``s1 = sum(x_i)`` and ``s2 = sum(x_i * (i + 1))``. The digest is SHA-256 over one line ``name dtype [shape] s1 s2`` for
each tensor, in order. It finds lost, swapped, stale and damaged data; it is no defence against somebody who forges weights.
"""

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

CHUNK_WORDS: Final = 4 << 20
"""Words folded at a time on a GPU, which keeps temporary memory below 70 MB."""

_PENDING: Final = 4096


class StreamDigest:
    """Digest of tensors given one after another.

    Sums stay on the tensors' device until the digest is asked for, so that updating does not wait for a GPU. An update reads the tensor
    in the order of the current stream: give it tensors whose bytes that stream may read.
    """

    def __init__(self) -> None:
        self.tensors = 0
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._pending: list[tuple[str, torch.Tensor]] = []
        self._weights: dict[torch.device, torch.Tensor] = {}

    def update(self, name: str, tensor: "torch.Tensor") -> None:
        """Adds a tensor of any dtype, device and layout."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._pending.append((f"{name} {dtype} {list(tensor.shape)}", self._sums(tensor)))
        self.tensors += 1
        self.nbytes += tensor.numel() * tensor.element_size()
        if len(self._pending) >= _PENDING:
            self._fold()

    def hexdigest(self) -> str:
        """Hex SHA-256 over all tensors so far; more may follow."""
        self._fold()
        return self._hash.copy().hexdigest()

    def _sums(self, tensor: "torch.Tensor") -> "torch.Tensor":
        words = _words(tensor)
        if words.device.type == "cpu":
            from rolloutfleet.tiles.hostsums import sums_of_run

            return sums_of_run(words)
        return fold(words, self._position_weights(words.device))

    def _position_weights(self, device: "torch.device") -> "torch.Tensor":
        import torch

        weights = self._weights.get(device)
        if weights is None:
            weights = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device)
            # Later updates may come from other streams than the one that fills this buffer.
            _synchronize(device)
            self._weights[device] = weights
        return weights

    def _fold(self) -> None:
        # The sums were queued on whatever stream was current at each update; only the whole device's word counts here.
        for device in {sums.device for _, sums in self._pending}:
            _synchronize(device)
        for line, sums in self._pending:
            first, second = sums.tolist()
            self._hash.update(f"{line} {first} {second}\n".encode())
        self._pending.clear()


def fold(words: "torch.Tensor", weights: "torch.Tensor") -> "torch.Tensor":
    """Both sums (int64 [2]) of words, as many at a time as there are weights 1, 2, 3 and so on, on their device."""
    import torch

    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), weights.numel()):
        chunk = words[start : start + weights.numel()]
        plain = chunk.sum(dtype=torch.int64)
        sums[0] += plain
        sums[1] += (chunk * weights[: chunk.numel()]).sum() + plain * start
    return sums


def _words(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -flat.numel() % 4
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def _synchronize(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
