"""The tensors that a rank computes with, each storage once and in one order that all ranks of a shape share."""

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from rolloutfleet.layout import shape_digest
from rolloutfleet_worker.rank.in_place import computes_from_weight, derives_from_parent, is_post_processed


def live_parameters(model: torch.nn.Module) -> tuple[list[tuple[str, torch.nn.Parameter]], dict[str, str]]:
    """Every parameter with elements by its first name in the model, tied ones once, sorted; and the first name by every name."""
    first: dict[tuple[int, int], tuple[str, torch.nn.Parameter]] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            # A tied parameter may be another object on the same memory.
            key = (parameter.data_ptr() or id(parameter), parameter.numel())
            names[name] = first.setdefault(key, (name, parameter))[0]
    return sorted(first.values(), key=lambda item: item[0]), names


def kernel_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer that loading or post-processing writes, as kernels compute with them.

    Two ranks of one shape (:func:`live_shape`) have equal lists; copying all of them makes one rank compute what the other does.

    Raises:
        ValueError: a kernel computes from something that is no parameter or buffer, so that a copy of these would not do.
    """
    if hidden := _hidden_state(model):
        raise ValueError(f"weights cannot be copied between engines in the kernels' format: {'; '.join(hidden[:3])}")
    return _registered(model)


def live_shape(model: torch.nn.Module) -> str:
    """One digest over names, types and shapes of all that :func:`kernel_tensors` lists: ranks with equal ones have equal lists."""
    described = []
    for name, tensor in _registered(model):
        strides = "" if tensor.is_contiguous() else f" in strides {list(tensor.stride())}"
        described.append((name, f"{tensor.dtype}{strides}", tensor.shape))
    return shape_digest(described)


def _registered(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters, _ = live_parameters(model)
    tensors: dict[str, torch.Tensor] = {name: parameter.data for name, parameter in parameters}
    seen = {tensor.data_ptr() for tensor in tensors.values()}
    for owner, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            # What is not persistent is made from the configuration alone.
            if buffer is None or not buffer.numel() or leaf in module._non_persistent_buffers_set:
                continue
            if buffer.data_ptr() not in seen:
                seen.add(buffer.data_ptr())
                tensors[f"{owner}.{leaf}" if owner else leaf] = buffer
    return sorted(tensors.items())


def _hidden_state(model: torch.nn.Module) -> list[str]:
    """Modules whose kernels keep weights outside parameters and buffers, or are not known not to."""
    known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    hidden = []
    for name, module in model.named_modules():
        if isinstance(module, QuantizeMethodBase) or not is_post_processed(module):
            continue
        method = getattr(module, "quant_method", None)
        if type(method) in known:
            packed = current_platform.is_cpu() and hasattr(module, "cpu_linear") and not computes_from_weight(module)
            elsewhere = getattr(method, "unquantized_backend", None) is UnquantizedMoeBackend.MOONEP
            if packed or elsewhere:
                hidden.append(f"{name} computes from a packed copy")
        elif isinstance(method, QuantizeMethodBase) or derives_from_parent(module) or hasattr(module, "kv_b_proj"):
            what = type(method if method is not None else module).__name__
            hidden.append(f"{name} may hold data that {what} derives after loading")
    return hidden
