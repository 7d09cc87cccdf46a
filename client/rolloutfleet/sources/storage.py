"""Where checkpoints lie: a folder of this machine, or anything that fsspec reaches."""

import posixpath
from pathlib import Path
from typing import Any, Final

from rolloutfleet.sources.safetensors import CheckpointError, Files

_DRIVERS: Final = {
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
}
"""Packages that fsspec needs besides itself, by the scheme of a URI."""


def open_files(place: str) -> Files:
    """The files of a checkpoint: ``place`` is a path of this machine, or a URI such as ``s3://bucket/run/step-100``.

    Raises CheckpointError when nothing is there, or no driver for the URI is installed.
    """
    scheme, separator, rest = place.partition("://")
    if not separator:
        return LocalFiles(Path(place))
    if scheme == "file":
        return LocalFiles(Path(rest))
    return RemoteFiles(place)


class LocalFiles:
    """Files of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        if not root.exists():
            raise CheckpointError(f"there is no file or folder {root}")

    def list(self) -> tuple[str, ...] | None:
        """Paths below the root."""
        if not Path(self.root).is_dir():
            raise CheckpointError(f"{self.root} is neither a folder nor a .safetensors file nor an index of such files")
        return tuple(sorted(str(path) for path in Path(self.root).iterdir()))

    def size(self, path: str) -> int | None:
        """Bytes of a file, None when there is none."""
        file = Path(path)
        return file.stat().st_size if file.is_file() else None

    def read(self, path: str, begin: int, end: int) -> bytes:
        """These bytes; CheckpointError when they cannot be had."""
        try:
            with Path(path).open("rb") as file:
                file.seek(begin)
                return _whole(path, begin, end, file.read(end - begin))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


class RemoteFiles:
    """Files of an object store or a server, by ranged reads through fsspec."""

    def __init__(self, root: str) -> None:
        scheme = root.partition("://")[0]
        try:
            import fsspec
        except ImportError as error:
            raise CheckpointError(
                f"reading {root} needs the package fsspec; install it with: pip install 'rolloutfleet[checkpoint]'"
            ) from error
        try:
            filesystem, path = fsspec.core.url_to_fs(root)
        except ImportError as error:
            package = _DRIVERS.get(scheme, str(error.name or scheme))
            raise CheckpointError(
                f"reading {root} needs the package {package}, which is not installed here; add it to the image, "
                f"or with: pip install {package}"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{root}: fsspec knows no scheme {scheme}: {error}") from error
        self._filesystem: Any = filesystem
        self.root = str(path).rstrip("/")
        self._given = root
        self._sizes: dict[str, int | None] = {}

    def list(self) -> tuple[str, ...] | None:
        """Paths below the root; None where the server does not list."""
        try:
            return tuple(sorted(self._filesystem.ls(self.root, detail=False)))
        except NotImplementedError:
            return None
        except FileNotFoundError as error:
            raise CheckpointError(f"there is nothing at {self._given}") from error
        except OSError as error:
            raise self._unreadable(self.root, error) from error

    def size(self, path: str) -> int | None:
        """Bytes of a file, None when there is none; asked for once."""
        if path not in self._sizes:
            try:
                self._sizes[path] = int(self._filesystem.info(path)["size"])
            except FileNotFoundError:
                self._sizes[path] = None
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path} has no size: its server does not tell; use a store with ranged reads"
                ) from error
            except OSError as error:
                raise self._unreadable(path, error) from error
        return self._sizes[path]

    def read(self, path: str, begin: int, end: int) -> bytes:
        """These bytes; CheckpointError when they cannot be had."""
        if begin == end:
            return b""
        try:
            return _whole(path, begin, end, self._filesystem.cat_file(path, start=begin, end=end))
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no file {path}") from error
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: str, error: OSError) -> CheckpointError:
        where = self._given if path == self.root else posixpath.join(self._given, posixpath.basename(path))
        return CheckpointError(
            f"{where} cannot be read: {type(error).__name__}: {error}. Is the address right, and are its credentials in the environment?"
        )


def _whole(path: str, begin: int, end: int, data: bytes) -> bytes:
    if len(data) != end - begin:
        raise CheckpointError(
            f"{path} gave {len(data)} of the bytes {begin} to {end}; it was cut off or changed meanwhile"
        )
    return data
