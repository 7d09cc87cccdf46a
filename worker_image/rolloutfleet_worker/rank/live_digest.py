"""A digest of the weights that a rank computes with, taken after loading.

Two engines of one shape that hold the same version give the same digest. Where a CPU kernel has packed a weight out of sight, the digest
covers what the kernel computes from it for a fixed input instead: evidence of the packed copy itself.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from rolloutfleet.layout import Block, shape_digest
from rolloutfleet.tiles.digesting import SumTable, sums_digest
from rolloutfleet_worker.rank.in_place import computes_from_weight
from rolloutfleet_worker.rank.live_tensors import live_parameters

_Entry = tuple[torch.Tensor, Block, int, Block, int]

_TOGETHER_BYTES: Final = 256 << 20


@torch.no_grad()
def live_digest(
    model: torch.nn.Module,
    modules: Collection[str] | None = None,
    cancelled: threading.Event | None = None,
    instead: Mapping[str, torch.Tensor] | None = None,
) -> str:
    """Hex digest over every parameter of the model, or of these modules alone; tied parameters count once, buffers do not.

    Where ``instead`` has a tensor for a parameter's name, that one counts: a copy that is about to be live.
    Raises ConnectionAbortedError soon after ``cancelled`` is set: on CPUs all weights of a model take long.
    """
    parameters, _ = live_parameters(model)
    given = instead or {}
    chosen = [
        (name, _flat(given.get(name, parameter.data)))
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
    device = chosen[0][1].device if chosen else torch.device("cpu")
    sums = torch.zeros((len(entries), 2), dtype=torch.int64, device=device)
    for some in _together(entries):
        if cancelled is not None and cancelled.is_set():
            raise ConnectionAbortedError("the digest of the live weights is not wanted any more")
        SumTable.build(some, sources=len(entries)).run(sums)
    shape = shape_digest((name, str(tensor.dtype), tensor.shape) for name, tensor in chosen)
    return str(sums_digest(shape, sums))


def _together(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    """All of a GPU's at once, which is quick; else some at a time."""
    if entries and entries[0][0].device.type == "cuda":
        yield entries
        return
    group: list[_Entry] = []
    filled = 0
    for entry in entries:
        group.append(entry)
        filled += entry[0].nbytes
        if filled >= _TOGETHER_BYTES:
            yield group
            group, filled = [], 0
    if group:
        yield group


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
