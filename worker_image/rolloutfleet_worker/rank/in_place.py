"""Which parameters a kernel computes from as the loader left them, so that writing them is all that a refit needs.

A list of what is known to keep no copy and no other layout, by platform, quantisation method and kernel; whatever is not on it goes
through vLLM's loader. That a parameter keeps its name, shape and type says nothing: kernels permute in place, and keep packed copies
that no list of parameters shows.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.utils import default_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase


def loader_reasons(model: torch.nn.Module) -> dict[int, str]:
    """Why a parameter may not be written in place, by its ``id``; those without an entry may."""
    reasons: dict[int, str] = {}

    def visit(module: torch.nn.Module, inherited: str | None) -> None:
        inherited = inherited or _post_processing(module)
        own = inherited or _method_reason(module) or _attention_reason(module)
        if own is not None:
            for parameter in module._parameters.values():
                if parameter is not None:
                    reasons.setdefault(id(parameter), own)
        for child in module._modules.values():
            # A quantisation method may hold other modules of the model, which it does not own.
            if child is not None and not isinstance(child, QuantizeMethodBase):
                visit(child, inherited)

    visit(model, None)
    return reasons


def is_post_processed(module: torch.nn.Module) -> bool:
    """Whether anything of vLLM's runs over the module's own parameters after loading."""
    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase) or _post_processing(module) is not None


def derives_from_parent(module: torch.nn.Module) -> bool:
    """Whether the module is an attention layer whose kernel keeps what it derives from its parent's parameters."""
    implementation = type(getattr(module, "impl", None))
    own = getattr(implementation, "process_weights_after_loading", None)
    return own is not None and own is not AttentionImplBase.process_weights_after_loading


def computes_from_weight(layer: torch.nn.Module) -> bool:
    """Whether a layer that vLLM dispatches on CPUs computes from its live weight, not from a packed copy.

    vLLM's dispatch leaves a function on the layer; one that holds no value of its own can compute only from what it is given.
    """
    function = getattr(layer, "cpu_linear", None)
    if function is torch.nn.functional.linear:
        return True
    return isinstance(function, FunctionType) and function.__closure__ is None and not function.__defaults__


def _post_processing(module: torch.nn.Module) -> str | None:
    if not callable(getattr(module, "process_weights_after_loading", None)):
        return None
    return f"{type(module).__name__} derives data from its weights after loading"


def _attention_reason(module: torch.nn.Module) -> str | None:
    for child in module._modules.values():
        if child is not None and is_deferred_attention_layer(child) and derives_from_parent(child):
            return f"{type(child.impl).__name__} derives data from its parent's parameters after loading"
    return None


def _method_reason(module: torch.nn.Module) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is None:
        return None
    known: dict[type, Callable[[torch.nn.Module, Any], str | None]] = {
        UnquantizedLinearMethod: _linear_reason,
        UnquantizedEmbeddingMethod: _embedding_reason,
        UnquantizedFusedMoEMethod: _experts_reason,
    }
    judge = known.get(type(method))
    return (
        f"{type(method).__name__} is not known to keep the loader's layout" if judge is None else judge(module, method)
    )


def _linear_reason(module: torch.nn.Module, method: Any) -> str | None:
    if current_platform.is_cuda() and method._gemm_impl is not default_unquantized_gemm:
        return "a FlashInfer kernel, not known to keep the loader's layout, computes it"
    return _embedding_reason(module, method)


def _embedding_reason(module: torch.nn.Module, _: Any) -> str | None:
    if current_platform.is_cuda() or (current_platform.is_cpu() and computes_from_weight(module)):
        return None
    if current_platform.is_cpu():
        return "a CPU kernel computes from a packed copy"
    return f"not known to keep the loader's layout on {current_platform.device_name}"


def _experts_reason(_: torch.nn.Module, method: Any) -> str | None:
    if current_platform.is_cuda() and method.unquantized_backend is UnquantizedMoeBackend.TRITON:
        return None
    return f"fused experts of backend {method.unquantized_backend.value} are not known to keep the loader's layout"
