"""A model as it is without the layers that vLLM wraps around it for adapters, for all that knows its weights by name."""

from typing import Final

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

_PREFIX: Final = "lora_base_layer_prefix"


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, or a tree in which every layer that can take an adapter is replaced by the layer inside it.

    vLLM renames the parameters of wrapped layers, so that its own loaders do not find them any more. The tree holds the live layers;
    only modules above wrapped ones are copies, which share their parameters and buffers with the originals. Fused experts, which keep a
    prefix for the names that wrapping gives them, lose it for good: nothing but this tree loads weights later.
    """
    seen: dict[int, torch.nn.Module] = {}

    def bare(module: torch.nn.Module) -> torch.nn.Module:
        if isinstance(module, BaseLayerWithLoRA):
            return bare(module.base_layer)
        if id(module) not in seen:
            children = {name: child if child is None else bare(child) for name, child in module._modules.items()}
            same = all(child is module._modules[name] for name, child in children.items())
            if getattr(module, _PREFIX, ""):
                setattr(module, _PREFIX, "")
            seen[id(module)] = module if same else _copy(module, children)
        return seen[id(module)]

    return bare(model)


def _copy(module: torch.nn.Module, children: dict[str, torch.nn.Module | None]) -> torch.nn.Module:
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = children
    if (info := LAYERWISE_INFO.get(module)) is not None:
        LAYERWISE_INFO[copy] = info
    return copy
