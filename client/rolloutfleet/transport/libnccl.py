"""The few functions of libnccl that moving weights takes, bound to the very library that torch has loaded."""

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

UNIQUE_ID_BYTES: Final = 128

_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7
_UINT8: Final = 1

Communicator = ctypes.c_void_p
_Stream = ctypes.c_void_p


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


_FUNCTIONS: Final[dict[str, tuple[Any, list[Any]]]] = {
    "ncclGetErrorString": (ctypes.c_char_p, [ctypes.c_int]),
    "ncclGetLastError": (ctypes.c_char_p, [Communicator]),
    "ncclGetVersion": (ctypes.c_int, [ctypes.POINTER(ctypes.c_int)]),
    "ncclGetUniqueId": (ctypes.c_int, [ctypes.POINTER(_UniqueId)]),
    "ncclCommInitRank": (ctypes.c_int, [ctypes.POINTER(Communicator), ctypes.c_int, _UniqueId, ctypes.c_int]),
    "ncclCommGetAsyncError": (ctypes.c_int, [Communicator, ctypes.POINTER(ctypes.c_int)]),
    "ncclCommAbort": (ctypes.c_int, [Communicator]),
    "ncclSend": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, Communicator, _Stream],
    ),
    "ncclRecv": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, Communicator, _Stream],
    ),
    "ncclBroadcast": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, Communicator, _Stream],
    ),
    "ncclGroupStart": (ctypes.c_int, []),
    "ncclGroupEnd": (ctypes.c_int, []),
}


class NcclError(ConnectionError):
    """NCCL refused a call or lost a peer; the text has NCCL's own words."""


class Library:
    """A loaded libnccl. Buffers are addresses and sizes in bytes, streams are CUDA stream handles; every call raises NcclError."""

    def __init__(self, path: str) -> None:
        """Loads the library; OSError when there is none at ``path``, or one that lacks a function."""
        self.path = path
        loaded = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(loaded, name)
            except AttributeError as error:
                raise OSError(f"{path} has no function {name}; NCCL 2.14 or newer is needed") from error
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def version(self) -> int:
        """Such as 22803 for 2.28.3."""
        number = ctypes.c_int()
        self._call("ncclGetVersion", None, ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """A new id under which ranks find each other; this process serves as the place where they meet."""
        identity = _UniqueId()
        self._call("ncclGetUniqueId", None, ctypes.byref(identity))
        return bytes(identity)

    def init_rank(self, unique_id: bytes, rank: int, world_size: int) -> Communicator:
        """The communicator of this rank on the current CUDA device; returns when every rank has called it, whenever that is."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"NCCL's unique id has {len(unique_id)} bytes; it must have {UNIQUE_ID_BYTES}")
        communicator = Communicator()
        self._call(
            "ncclCommInitRank",
            None,
            ctypes.byref(communicator),
            world_size,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
        )
        return communicator

    def send(self, communicator: Communicator, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._call("ncclSend", communicator, address, nbytes, _UINT8, peer, communicator, stream)

    def receive(self, communicator: Communicator, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._call("ncclRecv", communicator, address, nbytes, _UINT8, peer, communicator, stream)

    def broadcast(self, communicator: Communicator, address: int, nbytes: int, root: int, stream: int) -> None:
        self._call("ncclBroadcast", communicator, address, address, nbytes, _UINT8, root, communicator, stream)

    @contextmanager
    def grouped(self, communicator: Communicator) -> Iterator[None]:
        """Calls inside are launched together when the block ends."""
        self._call("ncclGroupStart", communicator)
        try:
            yield
        finally:
            # A group that was begun must be ended, or every later call of this thread would wait in it.
            self._call("ncclGroupEnd", communicator)

    def raise_async_error(self, communicator: Communicator) -> None:
        """Raises NcclError when something went wrong in the background since the last call."""
        error = ctypes.c_int()
        self._call("ncclCommGetAsyncError", communicator, communicator, ctypes.byref(error))
        if error.value not in {_SUCCESS, _IN_PROGRESS}:
            raise NcclError(self._sentence("an operation in flight", error.value, communicator))

    def abort(self, communicator: Communicator) -> None:
        """Ends all operations in flight and frees the communicator."""
        self._call("ncclCommAbort", None, communicator)

    def _call(self, name: str, communicator: Communicator | None, *arguments: object) -> None:
        result = self._functions[name](*arguments)
        if result not in {_SUCCESS, _IN_PROGRESS}:
            raise NcclError(self._sentence(name, result, communicator))

    def _sentence(self, what: str, result: int, communicator: Communicator | None) -> str:
        meaning = self._functions["ncclGetErrorString"](result).decode(errors="replace")
        last = (self._functions["ncclGetLastError"](communicator) or b"").decode(errors="replace").strip()
        return f"{what} failed with NCCL error {result}, {meaning}" + (f" ({last})" if last else "")


def find_library(maps: Path = Path("/proc/self/maps")) -> str:
    """Path of the libnccl that this process has loaded, else of the one that torch's own package would load, else its bare name."""
    for line in maps.read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libnccl.so"):
            return f"/{path}"
    if importlib.util.find_spec("nvidia") is not None:
        found = importlib.util.find_spec("nvidia.nccl")
        for folder in (found.submodule_search_locations or ()) if found else ():
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return str(library)
    return "libnccl.so.2"


__all__ = ["UNIQUE_ID_BYTES", "Communicator", "Library", "NcclError", "find_library"]
