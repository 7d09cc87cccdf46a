"""A digest of the weights that a rank computes with, taken after loading.

Two engines of one shape that hold the same version give the same digest. Where a CPU kernel has packed a weight out of sight, the digest
covers what the kernel computes from it for a fixed input instead: evidence of the packed copy itself.
"""

from typing import Any

import torch

from rolloutfleet.digest import StreamDigest


@torch.no_grad()
def live_digest(model: torch.nn.Module) -> str:
    """Hex digest over every parameter of the model, by name; tied parameters count once."""
    digest = StreamDigest()
    seen: set[int] = set()
    for name, parameter in sorted(model.named_parameters(remove_duplicate=True)):
        if parameter.numel() and parameter.data_ptr() not in seen:
            seen.add(parameter.data_ptr())
            digest.update(name, parameter.data)
    for name, layer in sorted(model.named_modules(), key=lambda item: item[0]):
        if hasattr(layer, "cpu_linear"):
            digest.update(f"{name}:computed", _computed(layer))
    return digest.hexdigest()


def _computed(layer: Any) -> torch.Tensor:
    inputs = (
        getattr(layer, "input_size_per_partition", None) or getattr(layer, "embedding_dim", None) or layer.input_size
    )
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    probe = torch.linspace(-1.0, 1.0, steps=2 * inputs, dtype=torch.float32).reshape(2, inputs).to(dtype)
    return layer.quant_method.apply(layer, probe, bias=None).contiguous()
