"""Adapters on one rank: whether vLLM can serve one with these tensors, and the file that vLLM loads it from once they have arrived.

All tensors take the detour: every rank receives them whole and verifies them, local rank 0 writes them down. No live weight is touched.
"""

import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from rolloutfleet.contract.adapter import AdapterSpec, HeldAdapter, manifest_key
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.names import KEPT_ADAPTER_MANIFESTS
from rolloutfleet.layout import Layout, checkpoint_layout
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS, version_folder, write_version

_BY_FILE: Final = "vLLM loads adapters from a file"
_MOST_FAULTS: Final = 50


@dataclass(slots=True)
class AdapterFaults:
    """Why vLLM cannot serve an adapter."""

    adapter: list[str] = field(default_factory=list)
    """Sentences about the adapter as a whole."""
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.adapter or self.missing or self.extra or self.misshapen)


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """A checked manifest of an adapter's tensors."""

    spec: AdapterSpec
    manifest: Manifest
    layout: Layout


class KnownAdapters:
    """The last few adapters that were checked without faults, by key."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._config = vllm_config
        self._known: OrderedDict[str, KnownAdapter] = OrderedDict()

    def check(self, manifest: Manifest, spec: AdapterSpec) -> tuple[AdapterFaults, KnownAdapter | None]:
        """Its faults, or what is known of it from now on."""
        faults = find_faults(self._model, self._config, manifest, spec)
        if faults:
            return faults, None
        key = manifest_key(manifest.digest(), spec)
        known = self._known.setdefault(key, KnownAdapter(spec, manifest, checkpoint_layout(manifest, reason=_BY_FILE)))
        self._known.move_to_end(key)
        while len(self._known) > KEPT_ADAPTER_MANIFESTS:
            self._known.popitem(last=False)
        return faults, known

    def find(self, key: str) -> KnownAdapter | None:
        """The adapter that was checked under this key."""
        return self._known.get(key)


class AdapterLoad:
    """One version of an adapter: what arrives is kept, and at the end written down by local rank 0."""

    begun: Final = False
    """No live weight ever changes."""

    def __init__(self, known: KnownAdapter, version: int, local_rank: int) -> None:
        self._known = known
        self._version = version
        self._writes = local_rank == 0
        self._tensors: dict[str, torch.Tensor] = {}
        self.held: HeldAdapter | None = None
        """What was written, on local rank 0."""
        self.seconds = 0.0

    def take(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if not self._writes:
            return
        began = time.monotonic()
        for name, tensor in tensors:
            # A copy of its own: safetensors refuses tensors that share the memory of a bucket.
            self._tensors[name] = torch.empty_like(tensor, device="cpu").copy_(tensor)
        self.seconds += time.monotonic() - began

    def finish(self, received_digest: str) -> tuple[bool, str]:
        """The layout never changes; what stands for the live parameters is what was received.

        Raises:
            OSError: the file cannot be written.
        """
        if self._writes:
            spec = self._known.spec
            folder = version_folder(Path(os.environ[ENV_ADAPTERS]), spec.name, self._version)
            nbytes, sha256 = write_version(folder, spec, lambda path: save_file(self._tensors, path))
            self.held = HeldAdapter(spec=spec, version=self._version, nbytes=nbytes, sha256=sha256)
            self._tensors = {}
        return False, received_digest

    def abandon(self) -> None:
        self._tensors = {}


def find_faults(model: torch.nn.Module, vllm_config: Any, manifest: Manifest, spec: AdapterSpec) -> AdapterFaults:
    """Why vLLM would refuse an adapter, or silently leave a part of it out; at most 50 tensors of a kind are named."""
    faults = AdapterFaults()
    lora = vllm_config.lora_config
    if lora is None:
        faults.adapter.append(
            f"adapter {spec.name} cannot be served: vLLM runs without --enable-lora; set spec.engine.lora of the fleet"
        )
        return faults
    highest = max([spec.rank, *spec.rank_pattern.values()])
    if highest > lora.max_lora_rank:
        faults.adapter.append(
            f"adapter {spec.name} has rank {highest}, vLLM takes up to {lora.max_lora_rank} (--max-lora-rank); raise "
            "spec.engine.lora.maxRank of the fleet"
        )
        return faults
    helper = PEFTHelper.from_dict(spec.peft_config())
    try:
        helper.validate_legal(lora)
    except ValueError as error:
        faults.adapter.append(f"adapter {spec.name} cannot be served: {error}")
        return faults
    _check_tensors(_Modules(model), helper, manifest, faults)
    for found in (faults.missing, faults.extra, faults.misshapen):
        found[:] = sorted(found)[:_MOST_FAULTS]
    return faults


def _check_tensors(modules: "_Modules", helper: PEFTHelper, manifest: Manifest, faults: AdapterFaults) -> None:
    halves: dict[str, dict[bool, TensorSpec]] = {}
    for tensor in manifest.tensors:
        try:
            module, is_a = parse_fine_tuned_lora_name(tensor.name, modules.renaming)
        except ValueError:
            faults.extra.append(tensor.name)
            continue
        if not modules.takes(module):
            faults.extra.append(tensor.name)
            continue
        halves.setdefault(module, {})[is_a] = tensor
        given, _ = parse_fine_tuned_lora_name(tensor.name)
        rank, _ = helper.get_rank_and_scaling(given)
        faults.misshapen += _misshapen(tensor, rank, modules.sizes(module), is_a=is_a)
    for pair in halves.values():
        if len(pair) == 1:
            ((is_a, tensor),) = pair.items()
            faults.missing.append(re.sub(r"(lora_(?:embedding_)?)[AB]", rf"\g<1>{'B' if is_a else 'A'}", tensor.name))


def _misshapen(tensor: TensorSpec, rank: int, sizes: tuple[int, int] | None, *, is_a: bool) -> Iterator[str]:
    """A sentence for a half that does not fit: A is [rank, input size], B is [output size, rank]."""
    own = tensor.shape[0 if is_a else -1] if len(tensor.shape) == 2 else None
    other = tensor.shape[1 if is_a else 0] if len(tensor.shape) == 2 else None
    wanted = None if sizes is None else sizes[0 if is_a else 1]
    if own == rank and (wanted is None or other == wanted):
        return
    size = "any" if wanted is None else wanted
    shape = f"[{rank}, {size}]" if is_a else f"[{size}, {rank}]"
    yield f"tensor {tensor.name} has shape {list(tensor.shape)}, half {'A' if is_a else 'B'} of rank {rank} is {shape} here"


class _Modules:
    """The modules of a model that take adapters, under the names that an adapter's tensors have."""

    def __init__(self, model: torch.nn.Module) -> None:
        manager: Any = model.lora_manager
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self.renaming = mapper.get_rename_mapper() if mapper is not None else None
        self._layers = manager.modules
        self._parts = {
            part: (fused, number)
            for fused, parts in manager.packed_modules.items()
            for number, part in enumerate(parts)
        }

    def takes(self, module: str) -> bool:
        return module in self._parts or (module in self._layers and module not in {f for f, _ in self._parts.values()})

    def sizes(self, module: str) -> tuple[int, int] | None:
        """Input and output size over all ranks; None for layers that are no plain linears."""
        fused, number = self._parts.get(module, (module, 0))
        layer = self._layers[fused].base_layer
        if not isinstance(layer, LinearBase):
            return None
        if isinstance(layer, QKVParallelLinear):
            heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)[number]
            return layer.input_size, heads * (layer.v_head_size if number == 2 else layer.head_size)
        outputs = getattr(layer, "output_sizes", None)
        return layer.input_size, outputs[number] if outputs and module in self._parts else layer.output_size
