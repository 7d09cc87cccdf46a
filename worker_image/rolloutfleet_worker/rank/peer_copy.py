"""A second copy of all that a rank computes with: a peer's weights arrive there while the engine serves, and are swapped in later."""

from collections.abc import Sequence

import torch

from rolloutfleet.layout import Block
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.peer import bytes_of
from rolloutfleet_worker.rank.room import aligned, room_bytes

Named = Sequence[tuple[str, torch.Tensor]]


def copy_bytes(live: Named) -> int:
    """Device memory that a second copy of these tensors takes."""
    return sum(aligned(tensor.nbytes) for _, tensor in live)


class PeerCopy:
    """One allocation that holds a second copy of every live tensor, in the kernels' own format; used for one version."""

    def __init__(self, live: Named, device: torch.device) -> None:
        """Raises RankError, with the numbers, where there is no room."""
        size, room = copy_bytes(live), room_bytes(device)
        if size > room:
            raise RankError(
                f"a second copy of the weights needs {size / 1e9:.2f} GB, {room / 1e9:.2f} GB are free on {device}"
            )
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors: dict[str, torch.Tensor] = {}
        """By name of each live tensor, its copy, of the same type, shape and strides."""
        entries = []
        start = 0
        for name, tensor in live:
            flat = buffer[start : start + tensor.nbytes]
            self.tensors[name] = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            block = Block.contiguous(0, tensor.nbytes)
            entries.append((flat, block, bytes_of(tensor), block))
            start += aligned(tensor.nbytes)
        self._device = device
        self._swap = CopyTable.build(entries, device)

    def copy_into_live(self) -> None:
        """Copies what lies here into the live tensors, on the current stream, and returns when it is there."""
        self._swap.run()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
