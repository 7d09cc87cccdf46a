"""Loading checkpoint tensors into a live model through vLLM's own layer-wise reload, with an exact way out when it ends early."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _get_original_loader,
    _place_kernel_tensors,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from rolloutfleet_worker.rank.in_place import derives_from_parent

_SCALES = ("_scale", "_scale_inv", ".scale")


class Reload:
    """One reload of all weights: :meth:`load` any number of times, then :meth:`finish`, or :meth:`abandon` at any point.

    After ``abandon`` the model is structurally sound, so that a later reload can begin, but holds a mixture of old and new weights.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._config = vllm_config
        self._scales: list[tuple[str, torch.Tensor]] = []
        self.begun = False

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors in checkpoint format to the model's loader; they are copied or kept until their layer is complete."""
        with torch.no_grad(), set_current_vllm_config(self._config), _complete_later():
            if not self.begun:
                self.begun = True
                _drop_stale_kernels(self._part)
                initialize_layerwise_reload(self._part)
            self._model.load_weights(self._noting_scales(tensors))

    def finish(self) -> None:
        """Process what is left and make the new weights the live ones.

        Raises:
            ValueError: a scale consists of zeros alone, which no quantisation gives.
        """
        if zeros := [name for name, nonzero in self._scales if not nonzero]:
            raise ValueError(
                f"scales that are all zero: {', '.join(sorted(zeros))}; send the scales of the quantised weights"
            )
        if not self.begun:
            return
        with torch.no_grad(), set_current_vllm_config(self._config):
            finalize_layerwise_reload(self._part, self._config.model_config)
            _repack_tied_head(self._model, self._part, self._config.model_config)
        if current_platform.is_cuda():
            torch.cuda.synchronize()

    def abandon(self) -> None:
        """Put the kernels' tensors back wherever a layer has not been completed."""
        if not self.begun:
            return
        with torch.no_grad():
            for layer in self._part.modules():
                info = LAYERWISE_INFO.get(layer)
                if info is not None and info.can_load():
                    if info.kernel_tensors is not None:
                        _place_kernel_tensors(layer, info)
                    info.reset()
                for tensor in get_layer_tensors(layer).values():
                    if getattr(tensor, "weight_loader", None) is not None:
                        tensor.weight_loader = _get_original_loader(tensor)
        if hasattr(self._part, "_original_do_torchao_reload"):
            self._part._do_torchao_reload = self._part._original_do_torchao_reload

    @property
    def _part(self) -> Any:
        """What is reloaded, as far as vLLM's reload asks for it: something with modules."""
        return self._model

    def _noting_scales(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name.endswith(_SCALES):
                self._scales.append((name, tensor.detach().count_nonzero()))
            yield name, tensor


class PartialReload(Reload):
    """A reload of the modules that some source tensors feed, from these tensors alone.

    Other modules keep their tensors, their memory and what they derive from it. The tensors must be all that feed these modules.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, modules: Iterable[str]) -> None:
        """Takes the names of the modules, as :meth:`Captured.modules_of` gives them.

        Raises:
            AttributeError: the model has no module of that name.
        """
        super().__init__(model, vllm_config)
        chosen = {id(module): module for module in map(model.get_submodule, modules)}
        for module in model.modules():
            if is_deferred_attention_layer(module) and _depends_on(model, module, chosen.values()):
                chosen[id(module)] = module
        self._chosen = _Part([module for module in model.modules() if id(module) in chosen])

    @property
    def _part(self) -> Any:
        return self._chosen


class _Part:
    """Some modules of a model, for vLLM's reload, which asks a model for its modules and notes a flag on it."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules)


def _depends_on(model: torch.nn.Module, attention: torch.nn.Module, chosen: Iterable[torch.nn.Module]) -> bool:
    """Whether the attention layer derives data from a chosen module: one that it holds, or its parent."""
    held = {id(module) for module in attention.modules()}
    wanted = {id(module) for module in chosen}
    if held & wanted:
        return True
    if not derives_from_parent(attention):
        return False
    return any(id(parent) in wanted and attention in parent.children() for parent in model.modules())


def _complete_later() -> Any:
    """vLLM checks multi-token-prediction models for completeness on each load, but buckets bring them in parts."""
    from vllm.model_executor.model_loader import mtp_validation

    disable = getattr(mtp_validation, "disable_mtp_completeness_check", None)
    return disable() if disable is not None else nullcontext()


def _drop_stale_kernels(model: Any) -> None:
    """On CPUs a fused mixture-of-experts kernel prepacks its weights once; a reload would write the unpacked layout over them."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_tied_head(model: torch.nn.Module, part: Any, model_config: Any) -> None:
    """On CPUs an output head tied to the embedding computes from a packed copy that a reload of the embedding leaves stale."""
    if not current_platform.is_cpu() or not getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        return
    reloaded = {
        tensor.data_ptr() for layer in part.modules() for tensor in layer._parameters.values() if tensor is not None
    }
    for name, layer in model.named_modules():
        if (
            name.rpartition(".")[2] == "lm_head"
            and hasattr(layer, "cpu_linear")
            and layer.weight.data_ptr() in reloaded
        ):
            layer.quant_method.process_weights_after_loading(layer)
