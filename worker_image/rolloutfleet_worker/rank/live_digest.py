"""A digest of the weights that a rank computes with, taken after loading.

Two engines of one shape that hold the same version give the same digest. Where a CPU kernel has packed a weight out of sight, the digest
covers what the kernel computes from it for a fixed input instead: evidence of the packed copy itself.
"""

from collections.abc import Collection
from typing import Any

import torch

from rolloutfleet.layout import Block, shape_digest
from rolloutfleet.tiles.digesting import SumTable, sums_digest
from rolloutfleet_worker.rank.in_place import computes_from_weight
from rolloutfleet_worker.rank.live_tensors import live_parameters


@torch.no_grad()
def live_digest(model: torch.nn.Module, modules: Collection[str] | None = None) -> str:
    """Hex digest over every parameter of the model, or of these modules alone; tied parameters count once, buffers do not."""
    parameters, _ = live_parameters(model)
    chosen = [
        (name, _flat(parameter.data))
        for name, parameter in parameters
        if modules is None or name.rpartition(".")[0] in modules
    ]
    for name, layer in sorted(model.named_modules(), key=lambda item: item[0]):
        if hasattr(layer, "cpu_linear") and not computes_from_weight(layer) and (modules is None or name in modules):
            chosen.append((f"{name}:computed", _flat(_computed(layer))))
    entries = [
        (tensor, block := Block.contiguous(0, tensor.numel()), number, block, min(4, tensor.element_size()))
        for number, (_, tensor) in enumerate(chosen)
    ]
    shape = shape_digest((name, str(tensor.dtype), tensor.shape) for name, tensor in chosen)
    return str(sums_digest(shape, SumTable.build(entries, sources=len(entries)).run()))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, in the order in which they lie in memory where they lie without gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().view(-1)


def _computed(layer: Any) -> torch.Tensor:
    inputs = (
        getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None) or layer.input_size
    )
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    probe = torch.linspace(-1.0, 1.0, steps=2 * inputs, dtype=torch.float32).reshape(2, inputs).to(dtype)
    return layer.quant_method.apply(layer, probe, bias=None).contiguous()
