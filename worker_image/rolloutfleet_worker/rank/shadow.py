"""A model's modules without their tensors: parameters in checkpoint format on torch's meta device, for vLLM's loader to run on."""

from collections.abc import Mapping

import torch
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs


def shadow_model(model: torch.nn.Module) -> torch.nn.Module:
    """The same tree of modules with every parameter as vLLM recorded it before it re-laid it out; shares no tensor with the model."""
    clones: dict[int, torch.nn.Module] = {}

    def clone(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in clones:
            return clones[id(module)]
        copy = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        clones[id(module)] = copy
        info = LAYERWISE_INFO.get(module)
        parameters, buffers = info.restore_metadata if info is not None else ({}, {})
        recorded = info is not None and type(module).__name__ not in SKIP_MODULES
        copy.__dict__["_parameters"] = _on_meta({**_kept(module._parameters, recorded), **parameters}, module, copy)
        copy.__dict__["_buffers"] = _on_meta({**_kept(module._buffers, recorded), **buffers}, module, copy)
        copy.__dict__["_modules"] = {
            name: child if child is None else clone(child) for name, child in module._modules.items()
        }
        return copy

    return clone(model)


def _kept(tensors: Mapping[str, torch.Tensor | None], recorded: bool) -> dict[str, torch.Tensor]:
    """What a reload leaves where it is: of a recorded module the few that vLLM never takes away.

    The others that the record lacks are made anew by a load, such as the scales of weights that are quantized when they come.
    """
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor is not None and tensor.numel() and (name in SKIP_TENSORS or not recorded)
    }


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
