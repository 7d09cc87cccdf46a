"""Whether the model can load a manifest, found by running vLLM's own loader over tensors that have shapes but no data.

The live model is not touched and goes on serving: the loader runs on a shadow of it. A parameter element that nothing is copied into
names a missing tensor; a source element that is copied nowhere on any rank, a wrong shape; a loader that knows no place for a name, an
extra tensor.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet_worker.rank.expert_names import ExpertNames
from rolloutfleet_worker.rank.shadow import shadow_model
from rolloutfleet_worker.rank.tracing import LoadTrace

_MOST_FAULTS = 50


@dataclass(slots=True)
class RankFaults:
    """One rank's view of a manifest."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    consumed: dict[str, int] = field(default_factory=dict)
    """Elements taken from each tensor that this rank does not take whole; not a fault by itself."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.misshapen)


@dataclass(frozen=True, slots=True)
class Checked:
    """The faults of a manifest, and the load of it that showed them."""

    faults: RankFaults
    shadow: torch.nn.Module
    trace: LoadTrace


def check_manifest(model: torch.nn.Module, vllm_config: Any, manifest: Manifest) -> Checked:
    """Faults of the manifest for this rank's share of the model; at most 50 tensors are named."""
    faults = RankFaults()
    specs = list(manifest.tensors)
    while True:
        trace = LoadTrace(shadow := shadow_model(model), specs)
        culprit, error = trace.run()
        if culprit is None:
            break
        _note_refused(shadow, vllm_config.parallel_config.tensor_parallel_size, culprit, error, faults)
        if len(faults.extra) + len(faults.misshapen) >= _MOST_FAULTS:
            return Checked(faults, shadow, trace)
        specs = [spec for spec in specs if spec is not culprit]
    experts = ExpertNames(shadow)
    faults.extra += [spec.name for spec in specs if spec.name not in trace.read and experts.is_unknown(spec.name)]
    faults.consumed = {
        spec.name: trace.read.get(spec.name, 0) for spec in specs if trace.read.get(spec.name, 0) != spec.elements
    }
    refused = {sentence.split()[1] for sentence in faults.misshapen}
    faults.missing = _missing(shadow, vllm_config.model_config, trace, manifest, refused, experts)[:_MOST_FAULTS]
    faults.misshapen += _short_experts(shadow, trace, manifest, experts)
    return Checked(faults, shadow, trace)


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
    trace: LoadTrace,
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
        if _is_optional_scale(shadow, owner, leaf, trace):
            continue
        parent, _, module = owner.rpartition(".")
        names = [f"{parent}.{part}.{leaf}" for part in packed.get(module, [])] or [name]
        absent = [candidate for candidate in names if candidate not in given]
        if absent or not refused.intersection(names):
            missing += absent or [f"part of {name}"]
    return sorted(set(missing))


def _is_optional_scale(shadow: torch.nn.Module, owner: str, leaf: str, trace: LoadTrace) -> bool:
    """Whether vLLM has a value of its own for an attention layer's scale; an 8-bit cache needs the trainer's for keys and values.

    Without them a reload would keep the scales of the old weights.
    """
    layer = shadow.get_submodule(owner)
    if not is_deferred_attention_layer(layer) or not leaf.endswith(("_scale", "_zero_point")):
        return False
    dtype = str(getattr(layer, "kv_cache_dtype", ""))
    if leaf not in {"k_scale", "v_scale"} or not dtype.startswith("fp8") or dtype.endswith("per_token_head"):
        return True
    # The older form has one scale, which vLLM takes for both.
    sources = [write.source or "" for write in trace.writes.get(f"{owner}.k_scale", ())]
    return leaf == "v_scale" and any(source.endswith(".kv_scale") for source in sources)


def _short_experts(shadow: torch.nn.Module, trace: LoadTrace, manifest: Manifest, experts: ExpertNames) -> list[str]:
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
