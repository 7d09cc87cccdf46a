"""CUDA memory shown to other processes: a small binding of the driver's inter-process calls.

torch's own sharing (``torch.multiprocessing.reductions``) pickles one handle a tensor and counts readers in files of its own. Here the
lender holds its tensors until the reader has answered, so a handle for each of the allocator's segments is enough.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

HANDLE_BYTES: Final = 64

_LIBRARY: Final = "libcuda.so.1"
_LEGACY_IPC_CAPABLE: Final = 10
_LAZY_ENABLE_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class Segment:
    """Memory of another process, mapped; unmapped when the last tensor over it is gone. A tensor is made with ``torch.as_tensor``."""

    def __init__(self, address: int, nbytes: int, device: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        # A process that ends unmaps by itself, when the driver may already be gone.
        weakref.finalize(self, _close, address, device).atexit = False


def allocation_of(address: int, device: int) -> tuple[int, int]:
    """First address and bytes of the allocation that holds an address of a device (torch's ordinal).

    Raises ValueError when the allocation cannot be shown to other processes, OSError when the driver refuses.
    """
    with _context(device):
        if not _is_capable(address):
            raise ValueError(
                f"the tensor at {address:#x} on cuda:{device} lies in memory that CUDA cannot show to other processes; start the trainer "
                "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native, or use another transport than Colocated"
            )
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def is_shareable(address: int, device: int) -> bool:
    """Whether CUDA can show the allocation that holds an address of a device to other processes; OSError when the driver refuses."""
    with _context(device):
        return _is_capable(address)


def handle_of(base: int, device: int) -> bytes:
    """The handle of an allocation by its first address; another one once the memory has been freed and allocated anew."""
    handle = _Handle()
    with _context(device):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle)


def open_segment(handle: bytes, nbytes: int, device: int) -> Segment:
    """Another process's allocation, readable by kernels of ``device``; open a handle once in a process.

    Raises OSError when the driver refuses, as it does for a handle of this very process or of one that has ended.
    """
    address = ctypes.c_uint64()
    with _context(device):
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
    return Segment(address.value, nbytes, device)


def _close(address: int, device: int) -> None:
    with _context(device):
        try:
            # Kernels that read the segment may still be queued.
            _call("cuCtxSynchronize")
        finally:
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _is_capable(address: int) -> bool:
    capable = ctypes.c_uint()
    _call("cuPointerGetAttribute", ctypes.byref(capable), _LEGACY_IPC_CAPABLE, ctypes.c_uint64(address))
    return bool(capable.value)


@contextmanager
def _context(device: int) -> Iterator[None]:
    """The device's primary context, which is torch's, current on this thread whatever torch has done on it."""
    _call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    _call("cuInit", ctypes.c_uint(0))
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBRARY)


def _call(function: str, *arguments: Any) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise OSError(f"{function} of {_LIBRARY} failed with error {code}: {(text.value or b'unknown').decode()}")
