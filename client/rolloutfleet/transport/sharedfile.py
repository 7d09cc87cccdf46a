"""Host memory shown to other processes: files of ``/dev/shm`` that cannot outlive their owner for long.

The owner holds a lock on its file for as long as it lives; the kernel lets go when it dies, however it dies. Whoever makes or gives up
such memory removes every file whose lock is free. So a crashed trainer's segment stays no longer than until the workers let go of it, or
the next trainer comes. Readers map a file without its lock, and keep the memory when the name is gone.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import weakref
from functools import cache
from pathlib import Path
from typing import Final

import torch

from rolloutfleet.locality import SHARED_MEMORY

PREFIX: Final = "rolloutfleet-"

_NAME: Final = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")
_FAILED: Final = ctypes.c_void_p(-1).value


class SharedFile:
    """Memory that this process owns and others may map by ``name``; ``octets`` is a uint8 tensor over it.

    Raises OSError, with how much room there is, when ``nbytes`` do not fit: all of them are taken at once, since a write to memory that
    the file system cannot give would end the process.
    """

    def __init__(self, nbytes: int) -> None:
        remove_orphans()
        self.nbytes = nbytes
        path, lock = _create()
        self.name = path.name
        self.close = weakref.finalize(self, _remove, path, lock, os.getpid())
        try:
            os.posix_fallocate(lock, 0, nbytes)
        except OSError as error:
            self.close()
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"{SHARED_MEMORY} has {_free_bytes()} bytes left and the tensors take {nbytes}: give the trainer's pod a larger "
                "emptyDir of medium Memory there, or use another transport than Colocated",
            ) from error
        self.octets = torch.frombuffer(mmap.mmap(lock, nbytes), dtype=torch.uint8)


def map_file(name: str, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """The memory behind a name, as a uint8 tensor that shows what the owner writes; unmapped when the last view of it is gone.

    It is to be read only: writing to the tensor ends the process, unless the memory is pinned, so that GPUs copy it at the speed of
    their bus. Raises ValueError for a name that no :class:`SharedFile` has, FileNotFoundError when the owner has given it up, and OSError
    when it is smaller than ``nbytes`` or cannot be pinned.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of shared memory; it must match {_NAME.pattern}")
    path = SHARED_MEMORY / name
    # CUDA pins only pages that it could write.
    access, protection = (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE) if pinned else (os.O_RDONLY, mmap.PROT_READ)
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            raise OSError(f"{path} has {size} bytes, the trainer speaks of {nbytes}")
        address = _libc().mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes of {path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)
    # Python's own mmap gives torch a buffer that it calls unsafe unless pages are writable.
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, nbytes).atexit = False
    if pinned:
        _pin(memory, address, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: ctypes.Array[ctypes.c_ubyte], address: int, nbytes: int) -> None:
    runtime = torch.cuda.cudart()
    failure = int(runtime.cudaHostRegister(address, nbytes, 0))
    if failure:
        raise OSError(
            f"CUDA cannot pin {nbytes} bytes of the trainer's memory (cudaHostRegister gives {failure}); the pod's limit of locked memory "
            "may be too low"
        )
    # Finalizers of one object run in the reverse order of their making: unpinned first, then unmapped.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def remove_orphans() -> None:
    """Removes the files whose owners are gone; those of other users stay."""
    for path in sorted(SHARED_MEMORY.glob(f"{PREFIX}*")):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)


def _create() -> tuple[Path, int]:
    """A new file, and the descriptor that holds its lock; again when somebody took it for an orphan before it was locked."""
    while True:
        path = SHARED_MEMORY / f"{PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def _remove(path: Path, lock: int, owner: int) -> None:
    # A process forked from the owner runs the owner's finalizers too when it exits.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
    os.close(lock)


def _free_bytes() -> int:
    room = os.statvfs(SHARED_MEMORY)
    return room.f_bavail * room.f_frsize


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
