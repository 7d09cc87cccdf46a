"""Whether the live parameters hold what a traced layout says they hold, found by one load through vLLM's loader.

Sums of the source tensors, taken as they arrive, are compared with sums of the blocks of the live parameters where the layout has them.
The sums weigh each word by its place in the source tensor, so that a kernel that permutes its weights is found although every shape fits.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from rolloutfleet.layout import NOT_COMPARED, Block, Layout, Placement, build_layout
from rolloutfleet.tiles.digesting import SumTable
from rolloutfleet_worker.rank.layout_capture import Captured
from rolloutfleet_worker.rank.live_tensors import live_parameters


class Calibration:
    """Begun before a load through the loader; told of every tensor that arrives; gives the verified layout after the load.

    ``known`` is what an earlier calibration gave: a load of its detours alone leaves its placements as they are, and may prove more.
    """

    def __init__(self, model: torch.nn.Module, captured: Captured, known: Layout | None = None) -> None:
        self._model = model
        self._captured = captured
        self._known = _placed_sources(known) if known is not None else frozenset()
        self._index = {spec.name: index for index, spec in enumerate(captured.manifest.tensors)}
        self._placements: dict[int, list[Placement]] = defaultdict(list)
        live = len(captured.layout.live)
        for placement in captured.layout.placements:
            if placement.parameter < live:
                self._placements[placement.source].append(placement)
        self._sums: dict[int, torch.Tensor] = {}
        self._varied: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()

    def arrived(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Takes the sums of source tensors, which may change or go as soon as this returns and the current stream has caught up.

        Raises:
            KeyError: the manifest has no tensor of such a name.
        """
        sources: list[int] = []
        entries: list[tuple[torch.Tensor, Block, int, Block, int]] = []
        for name, tensor in tensors:
            source = self._index[name]
            self._arrived.add(source)
            if not self._placements.get(source):
                continue
            varied = []
            for placement in self._placements[source]:
                # The sender casts in a transfer in place; vLLM's loader casts here.
                dtype = getattr(torch, self._captured.layout.parameters[placement.parameter].dtype)
                flat = tensor.detach().to(dtype).contiguous().view(-1)
                block = placement.source_block
                entries.append((flat, block, len(sources), block, _unit(flat)))
                words = flat.view(_INTEGERS[flat.element_size()])
                runs = words.as_strided(
                    (block.rows, block.run), (block.stride, 1), words.storage_offset() + block.offset
                )
                varied.append((runs != runs[0, 0]).any())
            sources.append(source)
            self._varied[source] = torch.stack(varied).all()
        if sources:
            # One table for all of them: making one waits for the device.
            self._sums |= zip(sources, SumTable.build(entries, sources=len(sources)).run().unbind(0), strict=True)

    def finish(self) -> Layout:
        """The layout of what is proved: placements that agree and could not agree by chance; all else is a detour, with its reason."""
        captured = self._captured
        traced = captured.layout
        detours = {detour.source: detour.reason for detour in traced.detours}
        detours |= self._disagreeing()
        detours |= self._unproved(detours)
        detours = captured.closed(detours)
        live = len(traced.live)
        placements = [p for p in traced.placements if p.parameter < live and p.source not in detours]
        kept = sorted({placement.parameter for placement in placements})
        numbers = {parameter: number for number, parameter in enumerate(kept)}
        return build_layout(
            captured.manifest,
            [traced.parameters[parameter] for parameter in kept],
            [Placement(p.source, p.source_block, numbers[p.parameter], p.block) for p in placements],
            detours,
            traced.shape,
        )

    def _disagreeing(self) -> dict[int, str]:
        """Sources whose place in the live parameters holds something else, or that did not arrive."""
        names = [spec.name for spec in self._captured.manifest.tensors]
        parameters, _ = live_parameters(self._model)
        live = {name: parameter.data for name, parameter in parameters}
        detours: dict[int, str] = {}
        entries: list[tuple[torch.Tensor, Block, int, Block, int]] = []
        for source, placements in self._placements.items():
            if source not in self._sums:
                if source not in self._known:
                    detours[source] = NOT_COMPARED
                continue
            for placement in placements:
                parameter = self._captured.layout.parameters[placement.parameter]
                tensor = live.get(parameter.name)
                if (
                    tensor is None
                    or tensor.numel() != parameter.elements
                    or str(tensor.dtype) != f"torch.{parameter.dtype}"
                ):
                    detours[source] = f"{parameter.name}: replaced by the load"
                elif not tensor.is_contiguous():
                    detours[source] = f"{parameter.name}: not contiguous after the load"
                else:
                    flat = tensor.view(-1)
                    entries.append((flat, placement.block, source, placement.source_block, _unit(flat)))
        if not self._sums:
            return detours
        found = SumTable.build(entries, sources=len(names)).run()
        compared = sorted(self._sums)
        equal = (torch.stack([self._sums[source] for source in compared]) == found[compared]).all(1)
        for source, agrees in zip(compared, equal.tolist(), strict=True):
            if not agrees:
                detours.setdefault(source, f"{names[source]}: the load put it elsewhere than traced, or changed it")
        return detours

    def _unproved(self, detours: Mapping[int, str]) -> dict[int, str]:
        """Sources that agree but are one value all over, so that any order of their elements would agree.

        They pass where nothing runs after the loader, and as vectors beside a matrix that has proved that its module keeps the order.
        """
        manifest, feeds, plain = self._captured.manifest, self._captured.feeds, self._captured.plain
        compared = sorted(self._varied)
        if not compared:
            return {}
        varied = torch.stack([self._varied[source] for source in compared]).tolist()
        proved = {
            m
            for source, varies in zip(compared, varied, strict=True)
            if varies and source not in detours
            for m in feeds[source]
        }
        unproved = {}
        for source, varies in zip(compared, varied, strict=True):
            spec = manifest.tensors[source]
            if varies or spec.elements == 1 or source in self._known:
                continue
            if all(module in plain or (len(spec.shape) == 1 and module in proved) for module in feeds[source]):
                continue
            unproved[source] = f"{spec.name}: holds one value only, which proves nothing of its order"
        return unproved


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _unit(tensor: torch.Tensor) -> int:
    return min(4, int(tensor.element_size()))


def _placed_sources(layout: Layout) -> frozenset[int]:
    live = len(layout.live)
    return frozenset(placement.source for placement in layout.placements if placement.parameter < live)
