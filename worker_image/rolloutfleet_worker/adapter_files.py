"""Where an engine's adapters lie, in the format that vLLM reads: a folder of the pod's own memory, one folder below it for each version.

The launcher makes the folder, local rank 0 writes into it, and the API server, which knows what requests still use, removes what is old.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from rolloutfleet.contract.adapter import AdapterSpec

ENV_ADAPTERS: Final = "ROLLOUTFLEET_ADAPTERS"
"""Set by the launcher for the processes of vLLM."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a volume of the pod's own
# Shared memory of transfers is swept by the prefix rolloutfleet-; these folders must not match it.
_PREFIX: Final = "rolloutfleet.adapters-"
TENSORS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"


@contextmanager
def private_folder() -> Iterator[Path]:
    """An empty folder that nobody else can read, gone at the end; so is what launchers that died have left.

    Raises:
        OSError: there is no such memory, or it cannot be written.
    """
    _remove_orphans()
    folder, lock = _create()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _create() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock; again when somebody took it for an orphan before it was locked."""
    while True:
        folder = Path(mkdtemp(prefix=_PREFIX, dir=MEMORY))
        lock = _lock(folder)
        if lock is not None and folder.exists():
            return folder, lock


def _remove_orphans() -> None:
    for folder in sorted(MEMORY.glob(f"{_PREFIX}*")):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor whose lock the kernel keeps for as long as its process lives; None for a folder that is somebody else's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def version_folder(root: Path, name: str, version: int) -> Path:
    """The folder of one version of an adapter."""
    return root / name / str(version)


def write_version(folder: Path, spec: AdapterSpec, write_tensors: Callable[[Path], object]) -> tuple[int, str]:
    """Bytes and digest of the file of tensors, once the version lies whole in its folder, in the place of any other attempt at it."""
    partial = folder.with_name(f"{folder.name}.partial")
    for stale in (partial, folder):
        if stale.exists():
            shutil.rmtree(stale)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    partial.mkdir(mode=0o700)
    write_tensors(partial / TENSORS)
    (partial / CONFIG).write_text(json.dumps(spec.peft_config()))
    partial.replace(folder)
    return measure(folder)


def measure(folder: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a version's file of tensors."""
    data = (folder / TENSORS).read_bytes()
    return len(data), sha256(data).hexdigest()


def remove_others(name_folder: Path, kept: set[Path]) -> None:
    """Remove all versions of one adapter but these, among them what a refit has left that never came to an end."""
    for folder in name_folder.iterdir():
        if folder not in kept:
            shutil.rmtree(folder)
