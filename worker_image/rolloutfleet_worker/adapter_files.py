"""Where an engine's adapters lie, in the format that vLLM reads: a folder of the pod's own memory, one folder below it for each version.

The launcher makes the folder, local rank 0 writes into it, and the API server, which knows what requests still use, removes what is old.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

from rolloutfleet.contract.adapter import AdapterSpec

ENV_ADAPTERS: Final = "ROLLOUTFLEET_ADAPTERS"
"""Set by the launcher for the processes of vLLM."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a volume of the pod's own
TENSORS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"


@contextmanager
def private_folder(pod_uid: str) -> Iterator[Path]:
    """An empty folder that nobody else can read, gone at the end; so is what a former container of the pod has left there.

    Raises:
        OSError: the name is taken by something that is not this user's folder.
    """
    folder = MEMORY / f"rolloutfleet-adapters-{pod_uid}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def version_folder(root: Path, name: str, version: int) -> Path:
    """The folder of one version of an adapter."""
    return root / name / str(version)


def write_version(folder: Path, spec: AdapterSpec, write_tensors: Callable[[Path], object]) -> tuple[int, str]:
    """Bytes and digest of the file of tensors, once the version lies whole in its folder, in the place of any other attempt at it."""
    partial = folder.with_name(f"{folder.name}.partial")
    for stale in (partial, folder):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir(mode=0o700, parents=True)
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
