"""Tensors over memory that belongs to others, who may free it: a trainer's weights between two refits."""

import ctypes

import torch


class _Octets:
    """Bytes of a GPU's memory, as torch takes them from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor over the memory of a contiguous one, which it does not keep alive: use it only while somebody else does."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if tensor.device.type == "cuda":
        with torch.cuda.device(tensor.device):
            octets = torch.as_tensor(_Octets(tensor.data_ptr(), nbytes), device=tensor.device)
    else:
        octets = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8)
    return octets.view(tensor.dtype)
