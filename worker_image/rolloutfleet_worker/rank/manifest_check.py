"""Whether the model can load a manifest, found by running vLLM's own loader over tensors that have shapes but no data.

The live model is not touched and goes on serving: the loader runs on a shadow of it, modules cloned without their tensors, parameters in
checkpoint format on torch's meta device, as vLLM recorded them before it re-laid them out. A dispatch mode, which only this thread sees,
notes every copy from a source tensor into a parameter. A parameter element that nothing is copied into names a missing tensor; a source
element that is copied nowhere on any rank, a wrong shape; a loader that knows no place for a name, an extra tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet_worker.rank.expert_names import ExpertNames

_LOADER_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_MOST_FAULTS = 50


@dataclass(slots=True)
class RankFaults:
    """One rank's view of a manifest."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    consumed: dict[str, int] = field(default_factory=dict)
    """Elements taken from each tensor that this rank does not take whole."""


def check_manifest(model: torch.nn.Module, vllm_config: Any, manifest: Manifest) -> RankFaults:
    """Faults of the manifest for this rank's share of the model; at most 50 tensors are named."""
    faults = RankFaults()
    specs = list(manifest.tensors)
    while True:
        trace = _Trace(shadow := shadow_model(model), specs)
        culprit, error = trace.run()
        if culprit is None:
            break
        _note_refused(shadow, vllm_config.parallel_config.tensor_parallel_size, culprit, error, faults)
        if len(faults.extra) + len(faults.misshapen) >= _MOST_FAULTS:
            return faults
        specs = [spec for spec in specs if spec is not culprit]
    experts = ExpertNames(shadow)
    faults.extra += [spec.name for spec in specs if spec.name not in trace.read and experts.is_unknown(spec.name)]
    faults.consumed = {
        spec.name: trace.read.get(spec.name, 0) for spec in specs if trace.read.get(spec.name, 0) != spec.elements
    }
    refused = {sentence.split()[1] for sentence in faults.misshapen}
    faults.missing = _missing(shadow, vllm_config.model_config, trace, manifest, refused, experts)[:_MOST_FAULTS]
    faults.misshapen += _short_experts(shadow, trace, manifest, experts)
    return faults


def shadow_model(model: torch.nn.Module) -> torch.nn.Module:
    """The same tree of modules with every parameter in checkpoint format on the meta device; shares no tensor with the model."""
    clones: dict[int, torch.nn.Module] = {}

    def clone(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in clones:
            return clones[id(module)]
        copy = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        clones[id(module)] = copy
        info = LAYERWISE_INFO.get(module)
        parameters, buffers = info.restore_metadata if info is not None else ({}, {})
        kept = {name: tensor for name, tensor in module._parameters.items() if tensor is not None and tensor.numel()}
        copy.__dict__["_parameters"] = _on_meta({**kept, **parameters}, module, copy)
        copy.__dict__["_buffers"] = _on_meta(
            {**{n: b for n, b in module._buffers.items() if b is not None}, **buffers}, module, copy
        )
        copy.__dict__["_modules"] = {
            name: child if child is None else clone(child) for name, child in module._modules.items()
        }
        return copy

    return clone(model)


def _on_meta(
    tensors: dict[str, torch.Tensor], original: torch.nn.Module, clone: torch.nn.Module
) -> dict[str, torch.Tensor]:
    result = {}
    for name, tensor in tensors.items():
        meta = to_meta_tensor(tensor)
        if getattr(meta, "weight_loader", None) is not None:
            # An earlier reload leaves its wrapper on the recorded tensor, which would swallow everything.
            meta.weight_loader = _get_original_loader(meta)
        meta = restore_layer_refs(meta, clone)
        for key, value in meta.__dict__.items():
            # Tensors that vLLM never moves off the device still name the live layer as their loader's owner.
            if getattr(value, "__self__", None) is original:
                meta.__dict__[key] = value.__func__.__get__(clone)
        result[name] = meta
    return result


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Trace(TorchDispatchMode):
    """Runs the loader and notes, by storage, what is read from each source and written to each parameter."""

    def __init__(self, shadow: torch.nn.Module, specs: list[TensorSpec]) -> None:
        super().__init__()
        self._shadow = shadow
        self._specs = specs
        self._sources = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }
        self._source_of = {_key(tensor): name for name, tensor in self._sources.items()}
        self._parameter_of = {_key(tensor): name for name, tensor in shadow.named_parameters()}
        self._written: dict[str, set[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        self.read: dict[str, int] = {}

    def run(self) -> tuple[TensorSpec | None, Exception | None]:
        """The tensor that the loader refused and its error, or None twice when it took all."""
        current: list[TensorSpec] = []

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in self._specs:
                current[:] = [spec]
                yield spec.name, self._sources[spec.name]
            current.clear()

        try:
            with torch.no_grad(), self:
                self._shadow.load_weights(feed())
        except _LOADER_ERRORS as error:
            if not current:
                raise
            return current[0], error
        return None, None

    def written_elements(self, parameter: str) -> int:
        return sum(torch.Size(shape).numel() for _, shape, _ in self._written.get(parameter, ()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}:
            target = args[0]
            parameter = self._parameter_of.get(_key(target))
            if parameter is not None:
                region = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
                self._written.setdefault(parameter, set()).add(region)
                if func is aten.copy_.default and (source := self._source_of.get(_key(args[1]))) is not None:
                    self.read[source] = self.read.get(source, 0) + target.numel()
                return target
        return func(*args, **(kwargs or {}))


def _note_refused(
    shadow: torch.nn.Module, ranks: int, culprit: TensorSpec, error: Exception | None, faults: RankFaults
) -> None:
    if isinstance(error, KeyError) or "no module or parameter named" in str(error):
        faults.extra.append(culprit.name)
        return
    parameters = dict(shadow.named_parameters())
    if culprit.name in parameters:
        takes = (
            f"{'the model' if ranks == 1 else f'each of {ranks} ranks'} takes {list(parameters[culprit.name].shape)}"
        )
    elif (fused := _fused_name(shadow, culprit.name)) in parameters:
        takes = f"which does not fit its part of {fused} {list(parameters[fused].shape)}"
    else:
        takes = f"vLLM's loader refuses it: {str(error) or type(error).__name__}"
    faults.misshapen.append(f"tensor {culprit.name} has shape {list(culprit.shape)}, {takes}")


def _fused_name(model: torch.nn.Module, name: str) -> str:
    """Name of the live parameter that a checkpoint tensor becomes part of, or its own name."""
    owner, _, leaf = name.rpartition(".")
    parent, _, module = owner.rpartition(".")
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return next(
        (f"{parent}.{fused}.{leaf}" for fused, parts in packed.items() if module in parts and fused != module), name
    )


def _missing(
    shadow: torch.nn.Module,
    model_config: Any,
    trace: _Trace,
    manifest: Manifest,
    refused: set[str],
    experts: ExpertNames,
) -> list[str]:
    """Checkpoint names that would fill what nothing was copied into."""
    given = {spec.name for spec in manifest.tensors}
    packed: dict[str, list[str]] = getattr(shadow, "packed_modules_mapping", {})
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    missing: list[str] = []
    for name, parameter in shadow.named_parameters():
        if trace.written_elements(name) >= get_tensor_load_numel(parameter):
            continue
        if tied and name.rpartition(".")[0].endswith("lm_head"):
            continue
        if experts.names(name):
            missing += experts.absent(name, given)
            continue
        owner, _, leaf = name.rpartition(".")
        parent, _, module = owner.rpartition(".")
        names = [f"{parent}.{part}.{leaf}" for part in packed.get(module, [])] or [name]
        absent = [candidate for candidate in names if candidate not in given]
        if absent or not refused.intersection(names):
            missing += absent or [f"part of {name}"]
    return sorted(set(missing))


def _short_experts(shadow: torch.nn.Module, trace: _Trace, manifest: Manifest, experts: ExpertNames) -> list[str]:
    """Tensors that leave a part of fused experts without weights; vLLM's loader takes them for experts that it has padded."""
    specs = {spec.name: spec for spec in manifest.tensors}
    faults = []
    for name, parameter in shadow.named_parameters():
        if trace.written_elements(name) >= get_tensor_load_numel(parameter) or experts.absent(name, specs.keys()):
            continue
        given = [specs[tensor] for tensor in sorted(experts.names(name) & specs.keys())]
        largest = max((spec.elements for spec in given), default=0)
        short = [spec for spec in given if spec.elements < largest] or given
        faults += [
            f"tensor {spec.name} has shape {list(spec.shape)}, which fills only part of {name} {list(parameter.shape)}"
            for spec in short
        ]
    return faults[:_MOST_FAULTS]
