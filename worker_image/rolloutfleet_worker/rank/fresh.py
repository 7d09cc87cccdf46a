"""A version loaded once more, into a model of its own, and compared with the live one (``refit.verify: Full``).

What has been written straight into live parameters is put together again into tensors of the checkpoint's format, by the same layout, and
given to vLLM's own loaders with what has gone through them already. So a layout that is wrong, a reload that is not what a load is, and
anything that processing leaves behind of the weights before, show as a difference. It needs room for a second model, and engines that stand
still: a model is made under a default type that is the whole process's.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout import Layout, Placement
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.live_tensors import live_parameters
from rolloutfleet_worker.rank.loading import live_destinations
from rolloutfleet_worker.rank.room import room_bytes

_NAMED: Final = 4


class FreshLoadDiffersError(ValueError):
    """The live model does not compute with what a fresh load of the version gives."""


class FreshLoad:
    """Told of every tensor that goes through the loader, it compares when all are there."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device, manifest: Manifest) -> None:
        self._model = model
        self._config = vllm_config
        self._device = device
        self._manifest = manifest
        self._kept: dict[str, torch.Tensor] = {}
        self.seconds = 0.0
        """That the comparison took."""

    def keep(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copies the tensors into the host's memory: what becomes of them in the loader is its own affair."""
        for name, tensor in tensors:
            self._kept[name] = tensor.detach().to("cpu", copy=True)

    @torch.no_grad()
    def compare(self, layout: Layout | None) -> None:
        """Returns when the live model holds what a fresh one does; ``layout`` says where tensors that were not kept lie.

        Raises:
            FreshLoadDiffersError: names parameters that differ.
            ValueError: there is no room for a second model, with the numbers.
        """
        began = time.monotonic()
        parameters, _ = live_parameters(self._model)
        needed, room = sum(parameter.nbytes for _, parameter in parameters), room_bytes(self._device)
        if needed > room:
            raise ValueError(
                f"refit.verify Full needs room for a second model: {needed / 1e9:.2f} GB, and {room / 1e9:.2f} GB are free on "
                f"{self._device}; give vLLM less (--gpu-memory-utilization), or set verify to Bytes"
            )
        fresh = self._load(layout)
        if live_digest(fresh) != live_digest(self._model):
            raise FreshLoadDiffersError(_describe(self._model, fresh))
        self.seconds = time.monotonic() - began

    def _load(self, layout: Layout | None) -> torch.nn.Module:
        config = _detached(self._config)
        model_config = config.model_config
        with set_default_torch_dtype(model_config.dtype), self._device:
            model: Any = initialize_model(vllm_config=config)
        with set_current_vllm_config(config):
            model.load_weights(self._sources(layout))
            process_weights_after_loading(model, model_config, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return model.eval()

    def _sources(self, layout: Layout | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The version's tensors in checkpoint format; elements that this rank takes no part of are not numbers."""
        placed: dict[int, list[Placement]] = defaultdict(list)
        live: dict[str, torch.Tensor] = {}
        if layout is not None:
            live = live_destinations(self._model, layout)
            for placement in layout.placements:
                if not layout.parameters[placement.parameter].temporary:
                    placed[placement.source].append(placement)
        for source, spec in enumerate(self._manifest.tensors):
            if spec.name in self._kept:
                yield spec.name, self._kept.pop(spec.name).to(self._device)
            elif layout is not None and source in placed:
                tensor = _together(layout, placed[source], live, spec.elements)
                yield spec.name, tensor.view(spec.shape)


def _detached(config: Any) -> Any:
    """The configuration, but for the registers into which layers enter themselves."""
    detached = copy.copy(config)
    detached.compilation_config = copy.copy(config.compilation_config)
    detached.compilation_config.static_forward_context = {}
    detached.compilation_config.static_all_moe_layers = []
    return detached


def _together(
    layout: Layout, placements: Sequence[Placement], live: dict[str, torch.Tensor], elements: int
) -> torch.Tensor:
    first = live[layout.parameters[placements[0].parameter].name]
    nothing = float("nan") if first.is_floating_point() and first.element_size() > 1 else 0
    tensor = torch.full((elements,), nothing, dtype=first.dtype, device=first.device)
    CopyTable.build(
        (live[layout.parameters[p.parameter].name], p.block, tensor, p.source_block) for p in placements
    ).run()
    return tensor


def _describe(model: torch.nn.Module, fresh: torch.nn.Module) -> str:
    wanted = dict(live_parameters(fresh)[0])
    held = dict(live_parameters(model)[0])
    strange = sorted(wanted.keys() ^ held.keys())
    differing = strange or [name for name in sorted(held) if not _equal(held[name].data, wanted[name].data)]
    named = ", ".join(differing[:_NAMED]) or "what its kernels have packed"
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return f"the live weights are not those of a fresh load of the same version: {named}{more} differ"


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes; values that are no numbers count as equal to themselves."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)))
