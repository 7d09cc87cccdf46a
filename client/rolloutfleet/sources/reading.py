"""Bytes of a block out of a local tensor: a view where its elements follow one another, else one copy; then cast, and moved to a device."""

from math import prod
from typing import TYPE_CHECKING, Final

from rolloutfleet.layout.blocks import Block
from rolloutfleet.sources.regions import Region

if TYPE_CHECKING:
    import torch

PINNED_BYTES: Final = 32 << 20
"""Largest piece of pinned memory that is asked for at once."""


def read_region(tensor: "torch.Tensor", region: Region, block: Block) -> "torch.Tensor":
    """The block's elements in order, flat and contiguous; it must lie within the region, whose elements ``tensor`` holds."""
    import torch

    tensor = tensor.detach()
    located = region.locate(block)
    if located is None:
        tensor, region = _dense(tensor, region, block)
        located = region.locate(block)
        if located is None:
            raise ValueError(f"{block} falls into too many runs of a tensor of shape {list(region.whole)}")
    flat = tensor.as_strided((region.extent,), (1,))
    views = [
        flat.as_strided((part.rows, part.run), (part.stride, 1), flat.storage_offset() + part.offset)
        for part in located
    ]
    if len(views) == 1:
        return views[0].reshape(-1)
    return torch.cat([view.reshape(-1) for view in views])


def _dense(tensor: "torch.Tensor", region: Region, block: Block) -> "tuple[torch.Tensor, Region]":
    """The slice of the first axis that the block reaches into, copied into row-major order."""
    row = prod(region.whole[1:])
    last = block.offset + (block.rows - 1) * block.stride + block.run - 1
    begin, end = block.offset // row, last // row + 1
    copied = tensor.narrow(0, begin - region.start[0], end - begin).contiguous()
    start = (begin, *region.start[1:])
    return copied, Region(whole=region.whole, start=start, shape=tuple(copied.shape), strides=tuple(copied.stride()))


def move(tensor: "torch.Tensor", dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
    """The flat tensor cast and on the device; itself when it is so already.

    What a GPU is to get from pageable memory goes through pinned memory piece by piece, queued on the current stream: torch's host
    allocator hands a pinned piece out again only when the stream has passed it.
    """
    import torch

    if tensor.device.type != "cpu" or device.type != "cuda" or tensor.is_pinned():
        return tensor.to(device=device, dtype=dtype, non_blocking=device.type == "cuda")
    moved = torch.empty(tensor.shape, dtype=dtype, device=device)
    step = PINNED_BYTES // dtype.itemsize
    for begin in range(0, tensor.numel(), step):
        piece = tensor[begin : begin + step]
        pinned = torch.empty(piece.shape, dtype=dtype, pin_memory=True)
        pinned.copy_(piece)
        moved[begin : begin + step].copy_(pinned, non_blocking=True)
    return moved
