"""Content keys, and folders that appear in the cache whole or not at all."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from localcluster.mounts import unmount_below

KEY_LENGTH = 20


def content_key(files: Iterable[Path], facts: Mapping[str, str], base: Path) -> str:
    """Key of a result made from `files` (named relative to `base`) and `facts` (flags, versions).

    Equal contents give equal keys wherever the checkout lies. Raises FileNotFoundError for a missing file.
    """
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for file in sorted(files):
        name = os.path.relpath(file, base)
        data = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
        digest.update(f"\0{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:KEY_LENGTH]


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Holds a file lock; the kernel frees it when the process dies, however it dies."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def publish(target: Path, build: Callable[[Path], None]) -> bool:
    """Makes the folder `target` by `build(temporary folder)` and a rename; True when it had to be built.

    Two launchers that want the same folder build it once. What a killed build left is removed by the next.
    """
    if target.is_dir():
        return False
    with exclusive(target.parent / f".{target.name}.lock"):
        if target.is_dir():
            return False
        for stale in target.parent.glob(f".{target.name}.tmp-*"):
            _discard(stale)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        temporary.chmod(0o755)
        try:
            build(temporary)
        except BaseException:
            _discard(temporary)
            raise
        temporary.rename(target)
        return True


def _discard(folder: Path) -> None:
    # A killed debootstrap leaves /proc and /sys mounted inside: never delete through a mount.
    unmount_below([folder])
    shutil.rmtree(folder)


def write_atomically(file: Path, text: str, mode: int = 0o644) -> None:
    """Replaces `file` by `text` in one step; readers see the old or the new content."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    with os.fdopen(handle, "w") as temporary:
        temporary.write(text)
    Path(name).chmod(mode)
    Path(name).replace(file)
