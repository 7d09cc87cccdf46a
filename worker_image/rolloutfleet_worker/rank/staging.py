"""The second buffer: a version lies beside the live weights until one launch copies it into them."""

from collections.abc import Mapping

import torch

from rolloutfleet.layout import Block, Layout
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.room import buffer_starts, room_bytes


class Staging:
    """One allocation that holds a second copy of every parameter that a layout writes in place.

    It is made on the caller's thread, outside vLLM's memory pools, so that sleep neither moves nor drops it behind our back.
    """

    def __init__(self, layout: Layout, live: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Takes the live parameters, flat, by name.

        Raises:
            RankError: there is no room, with the numbers, or some tensor of the layout takes the detour.
        """
        if layout.detours:
            raise RankError(
                f"a version cannot be staged while tensors go through vLLM's loader: {'; '.join(layout.reasons(3))}"
            )
        self._layout_digest = layout.digest
        self._addresses = _addresses(live)
        starts, size = buffer_starts(layout)
        room = room_bytes(device)
        if size > room:
            raise RankError(
                f"a second buffer needs {size / 1e9:.2f} GB, {room / 1e9:.2f} GB are free on {device}; give vLLM less "
                "(--gpu-memory-utilization) or set spec.refit.staging to Never"
            )
        self.nbytes = size
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.destinations = {
            parameter.name: self._buffer[starts[parameter.name] : starts[parameter.name] + parameter.nbytes].view(
                getattr(torch, parameter.dtype)
            )
            for parameter in layout.parameters
        }
        """By parameter name, where a staged version is received into; padding that no tensor fills is never read."""
        self._swap = CopyTable.build(
            (self.destinations[name], block, live[name], block) for name, block in _placed_runs(layout)
        )

    def fits(self, layout: Layout, live: Mapping[str, torch.Tensor]) -> bool:
        """Whether it was made for this layout and for live parameters where these lie."""
        return self._layout_digest == layout.digest and self._addresses == _addresses(live)

    def copy_into_live(self) -> None:
        """Copies what lies here into the live parameters, on the current stream, and returns when it is there."""
        self._swap.run()
        if self._buffer.device.type == "cuda":
            torch.cuda.current_stream(self._buffer.device).synchronize()


def _addresses(live: Mapping[str, torch.Tensor]) -> tuple[tuple[str, int], ...]:
    return tuple((name, tensor.data_ptr()) for name, tensor in sorted(live.items()))


def _placed_runs(layout: Layout) -> list[tuple[str, Block]]:
    """The blocks of parameters that tensors go to, neighbours joined."""
    runs: list[tuple[int, Block]] = []
    for placement in layout.placements:
        block = placement.block
        if runs and runs[-1][0] == placement.parameter and runs[-1][1].is_contiguous and block.is_contiguous:
            before = runs[-1][1]
            if before.end == block.offset:
                runs[-1] = (placement.parameter, Block.contiguous(before.offset, before.elements + block.elements))
                continue
        runs.append((placement.parameter, block))
    return [(layout.parameters[parameter].name, block) for parameter, block in runs]
