"""Where each tensor of a manifest lies in this rank's live parameters, learned from vLLM's own loader.

What cannot be told as blocks that are copied, or may not be written in place, takes the detour through the loader, with the reason:
the name of a parameter or tensor, a colon, and a sentence that is the same for all of a kind.
Modules are reloaded whole: if one tensor of a module takes the detour, so do all that feed it.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout import (
    Block,
    Layout,
    Parameter,
    Placement,
    block_of,
    build_layout,
    checkpoint_layout,
    first_overlap,
    overlap,
    pair,
    subtract,
)
from rolloutfleet_worker.rank.in_place import is_post_processed, loader_reasons
from rolloutfleet_worker.rank.live_tensors import live_parameters, live_shape
from rolloutfleet_worker.rank.manifest_check import Checked, RankFaults, check_manifest
from rolloutfleet_worker.rank.tracing import Write

_CASTS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_FAULTY = "the model cannot load the manifest"


class UnsupportedModelError(RuntimeError):
    """The engine moves weights by itself, so that what its loader does once tells nothing of where they are later."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A manifest as this rank's model takes it."""

    manifest: Manifest
    faults: RankFaults
    layout: Layout
    """What the loader was seen to do; nothing but detours where there are faults. Not yet compared with a real load."""
    fills: Mapping[str, tuple[Block, ...]]
    """By live parameter, the blocks that the loader fills with one value, which no refit changes: padding of a vocabulary."""
    feeds: Mapping[int, tuple[str, ...]]
    """By source tensor, the modules whose parameters it goes to."""
    plain: frozenset[str]
    """Those of these modules over which nothing of vLLM's runs after loading."""
    seconds: float

    def modules_of(self, sources: Iterable[int]) -> tuple[str, ...]:
        """The modules that these source tensors feed, sorted: what a :class:`PartialReload` of them needs."""
        return tuple(sorted({module for source in sources for module in self.feeds.get(source, ())}))

    def closed(self, detours: Mapping[int, str]) -> dict[int, str]:
        """The detours and all that must take the detour with them, since they share a module."""
        return _closed(detours, self.feeds)


def capture_layout(model: torch.nn.Module, vllm_config: Any, manifest: Manifest) -> Captured:
    """Faults of a manifest for this rank's share of the model, and where its tensors go; the live model is not touched.

    Raises:
        UnsupportedModelError: experts move between slots while the engine runs.
    """
    if vllm_config.parallel_config.enable_eplb:
        raise UnsupportedModelError(
            "the engine balances experts (enable_eplb), so that an expert's weights lie elsewhere than its loader puts them; "
            "start vLLM without --enable-eplb"
        )
    began = time.monotonic()
    checked = check_manifest(model, vllm_config, manifest)
    assembly = _Assembly(model, checked, manifest)
    shape = live_shape(model)
    layout = checkpoint_layout(manifest, shape, _FAULTY) if checked.faults else assembly.layout(shape)
    return Captured(
        manifest=manifest,
        faults=checked.faults,
        layout=layout,
        fills=assembly.fills,
        feeds=assembly.feeds,
        plain=assembly.plain,
        seconds=time.monotonic() - began,
    )


class _Assembly:
    """The layout that a trace comes to."""

    def __init__(self, model: torch.nn.Module, checked: Checked, manifest: Manifest) -> None:
        self._trace = checked.trace
        self._manifest = manifest
        self._index = {spec.name: index for index, spec in enumerate(manifest.tensors)}
        self._traced = dict(checked.shadow.named_parameters())
        self._live = dict(model.named_parameters(remove_duplicate=False))
        self._storages, self._first = live_parameters(model)
        reasons = loader_reasons(model)
        self._forbidden = {
            self._first[name]: reasons[id(live)]
            for name, live in self._live.items()
            if live.numel() and id(live) in reasons
        }
        self.fills: dict[str, tuple[Block, ...]] = {}
        self.feeds = self._feeds()
        fed = {module for modules in self.feeds.values() for module in modules}
        self.plain = frozenset(name for name in fed if not is_post_processed(model.get_submodule(name)))

    def layout(self, shape: str) -> Layout:
        detours = {self._index[name]: _altered(name, operation) for name, operation in self._trace.altered.items()}
        copies: dict[str, list[tuple[int, Block, Block]]] = {}
        by_storage: dict[str, list[str]] = defaultdict(list)
        for target in self._trace.writes.keys() | self._trace.computed.keys():
            by_storage[self._first.get(target, target)].append(target)
        for name, targets in sorted(by_storage.items()):
            sources = {source for target in targets for source in self._sources_of(target)}
            reason = next(filter(None, map(self._reason, sorted(targets))), None)
            if reason is None:
                writes = [write for target in sorted(targets) for write in self._trace.writes[target]]
                reason = self._gather(name, writes, copies)
            if reason is not None:
                copies.pop(name, None)
                for source in sources:
                    detours.setdefault(source, reason)
        detours = _closed(detours, self.feeds)
        parameters = {name: parameter for name, parameter in self._storages if name in copies}
        numbers = {name: number for number, name in enumerate(parameters)}
        return build_layout(
            self._manifest,
            [Parameter(name, _dtype(parameter), parameter.numel()) for name, parameter in parameters.items()],
            [
                Placement(source, source_block, numbers[name], block)
                for name, blocks in copies.items()
                for source, source_block, block in blocks
                if source not in detours
            ],
            detours,
            shape,
        )

    def _feeds(self) -> dict[int, tuple[str, ...]]:
        feeds: dict[int, set[str]] = defaultdict(set)
        for target in self._trace.writes.keys() | self._trace.computed.keys():
            for source in self._sources_of(target):
                feeds[source].add(target.rpartition(".")[0])
        return {source: tuple(sorted(modules)) for source, modules in sorted(feeds.items())}

    def _sources_of(self, target: str) -> set[int]:
        names = {write.source for write in self._trace.writes.get(target, ()) if write.source is not None}
        return {self._index[name] for name in names | self._trace.computed_from.get(target, set())}

    def _reason(self, target: str) -> str | None:
        """Why a parameter cannot be written in place as the loader was seen to write it."""
        if (operation := self._trace.computed.get(target)) is not None:
            return f"{target}: vLLM's loader computes it ({operation})"
        traced, live = self._traced.get(target), self._live.get(target)
        if traced is None:
            return f"{target}: a buffer"
        if live is None or (traced.numel() and not live.numel()):
            return f"{target}: packed out of sight after loading"
        return _difference(target, traced, live) or _prefixed(target, self._forbidden.get(self._first[target]))

    def _gather(
        self,
        name: str,
        writes: list[Write],
        copies: dict[str, list[tuple[int, Block, Block]]],
    ) -> str | None:
        """Adds the blocks of one live parameter, or gives the reason why it has to take the detour as a whole."""
        live = self._live[name]
        blocks: list[tuple[int, Block, Block]] = []
        fills: list[Block] = []
        for write in dict.fromkeys(writes):
            into = block_of(*write.region)
            if into is None:
                return f"{name}: written in steps"
            if write.source is None or write.source_region is None:
                if any(overlap(block, fill) for _, _, block in blocks for fill in into):
                    return f"{name}: filled where a tensor was copied to"
                fills += into
                continue
            source = self._index[write.source]
            spec = self._manifest.tensors[source]
            taken = block_of(*write.source_region)
            if taken is None:
                return f"{name}: takes {spec.name} transposed"
            if not _casts(getattr(torch, spec.dtype), live.dtype):
                return f"{name}: {spec.dtype} is not simply cast to {_dtype(live)}"
            blocks += [(source, from_block, to_block) for from_block, to_block in pair(taken, into)]
        placed = sorted((block for _, _, block in blocks), key=lambda block: block.offset)
        if first_overlap(placed) is not None:
            return f"{name}: written more than once in the same place"
        self.fills[name] = tuple(_beside(fills, placed))
        covered = sum(block.elements for block in (*placed, *self.fills[name]))
        if covered != live.numel():
            return f"{name}: {live.numel() - covered} of {live.numel()} elements come from no tensor (padding)"
        copies[name] = blocks
        return None


def _closed(detours: Mapping[int, str], feeds: Mapping[int, tuple[str, ...]]) -> dict[int, str]:
    fed_by: dict[str, list[int]] = defaultdict(list)
    for source, modules in feeds.items():
        for module in modules:
            fed_by[module].append(source)
    closed = dict(sorted(detours.items()))
    pending = list(closed)
    seen: set[str] = set()
    while pending:
        source = pending.pop()
        for module in feeds.get(source, ()):
            if module not in seen:
                seen.add(module)
                added = [other for other in fed_by[module] if other not in closed]
                closed |= dict.fromkeys(added, closed[source])
                pending += added
    return closed


def _altered(name: str, operation: str) -> str:
    return f"{name}: vLLM's loader changes it before it reads it ({operation})"


def _prefixed(target: str, reason: str | None) -> str | None:
    return None if reason is None else f"{target}: {reason}"


def _difference(name: str, traced: torch.Tensor, live: torch.Tensor) -> str | None:
    """How a live parameter is not as the loader fills it."""
    if live.dtype != traced.dtype:
        return f"{name}: {_dtype(live)} after loading, {_dtype(traced)} before"
    if live.shape != traced.shape:
        return f"{name}: shape {list(live.shape)} after loading, {list(traced.shape)} before"
    if live.stride() != traced.stride() or not live.is_contiguous():
        return f"{name}: strides {list(live.stride())} after loading, {list(traced.stride())} before"
    if live.device.type != current_platform.device_type:
        return f"{name}: lies on device {live.device.type}"
    return None


def _casts(source: torch.dtype, live: torch.dtype) -> bool:
    return source == live or (source in _CASTS and live in _CASTS)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _beside(fills: list[Block], placed: list[Block]) -> list[Block]:
    """What fills cover beside the blocks that tensors are copied to, each element once."""
    left: list[Block] = []
    for fill in fills:
        parts = [fill]
        for block in (*placed, *left):
            parts = [piece for part in parts for piece in subtract(part, block)]
        left += parts
    return left
