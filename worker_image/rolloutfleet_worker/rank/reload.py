"""Loading checkpoint tensors into a live model through vLLM's own layer-wise reload, with an exact way out when it ends early."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    _place_kernel_tensors,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform


class Reload:
    """One reload of all weights: :meth:`load` any number of times, then :meth:`finish`, or :meth:`abandon` at any point.

    After ``abandon`` the model is structurally sound, so that a later reload can begin, but holds a mixture of old and new weights.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._config = vllm_config
        self.begun = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors in checkpoint format to the model's loader; they are copied or kept until their layer is complete."""
        with torch.no_grad(), set_current_vllm_config(self._config), _complete_later():
            if not self.begun:
                self.begun = True
                _drop_stale_kernels(self._model)
                initialize_layerwise_reload(self._model)
            self._model.load_weights(tensors)

    def finish(self) -> None:
        """Process what is left and make the new weights the live ones."""
        with torch.no_grad(), set_current_vllm_config(self._config):
            finalize_layerwise_reload(self._model, self._config.model_config)
            _repack_tied_head(self._model, self._config.model_config)
        if current_platform.is_cuda():
            torch.cuda.synchronize()

    def abandon(self) -> None:
        """Put the kernels' tensors back wherever a layer has not been completed."""
        if not self.begun:
            return
        with torch.no_grad():
            for layer in self._model.modules():
                info = LAYERWISE_INFO.get(layer)
                if info is not None and info.can_load():
                    if info.kernel_tensors is not None:
                        _place_kernel_tensors(layer, info)
                    info.reset()
                for tensor in get_layer_tensors(layer).values():
                    if getattr(tensor, "weight_loader", None) is not None:
                        tensor.weight_loader = _get_original_loader(tensor)
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload


def _complete_later() -> Any:
    """vLLM checks multi-token-prediction models for completeness on each load, but buckets bring them in parts."""
    from vllm.model_executor.model_loader import mtp_validation

    disable = getattr(mtp_validation, "disable_mtp_completeness_check", None)
    return disable() if disable is not None else nullcontext()


def _drop_stale_kernels(model: torch.nn.Module) -> None:
    """On CPUs a fused mixture-of-experts kernel prepacks its weights once; a reload would write the unpacked layout over them."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_head(model: torch.nn.Module, model_config: Any) -> None:
    """On CPUs an output head tied to the embedding computes from a packed copy that a reload of the embedding leaves stale."""
    if not current_platform.is_cpu() or not getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        return
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] == "lm_head" and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
