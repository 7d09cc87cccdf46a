"""Checkpoints in safetensors format: which files there are, and where each tensor's bytes lie in them. Needs no torch."""

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

from rolloutfleet.contract.manifest import DTYPE_BYTES, TensorSpec

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SUFFIX: Final = ".safetensors"
_MOST_HEADER_BYTES: Final = 100_000_000
_NAMED: Final = 8

_DTYPES: Final[Mapping[str, str]] = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it is: the text names the file or tensor, the rule, and what to do."""


class Files(Protocol):
    """Read access to the folder or file in which a checkpoint lies; paths are those that :meth:`list` gives, or joined to :attr:`root`."""

    root: str
    """Path of the checkpoint as it was given."""

    def list(self) -> tuple[str, ...] | None:
        """Paths of the files directly below the root; None where files cannot be listed. CheckpointError when there is no such folder."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a file; None when it does not exist."""
        ...

    def read(self, path: str, begin: int, end: int) -> bytes:
        """These bytes of a file, all of them."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, and where its bytes are."""

    spec: TensorSpec
    path: str
    begin: int
    """Offset of its first byte in the file."""


def find_tensors(files: Files) -> tuple[StoredTensor, ...]:
    """Every tensor of the checkpoint, in the order of files and, within each, of bytes.

    The root is a ``.safetensors`` file, an index (``….safetensors.index.json``), or a folder that holds an index, or else
    ``.safetensors`` files. Raises CheckpointError.
    """
    shards, index = _find_shards(files)
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in _read_header(files, shard):
            name = tensor.spec.name
            if name in found:
                raise CheckpointError(
                    f"tensor {name} is both in {found[name].path} and in {shard}; it must be in one file"
                )
            found[name] = tensor
    if index is not None:
        _check_index(index, found)
    if not found:
        raise CheckpointError(f"checkpoint {files.root} holds no tensors in {', '.join(shards)}")
    return tuple(found.values())


def _find_shards(files: Files) -> tuple[tuple[str, ...], Mapping[str, str] | None]:
    """The files in order; with an index, also which file it promises for each tensor."""
    root = files.root
    if root.endswith(SUFFIX):
        return (root,), None
    if root.endswith(".json"):
        return _read_index(files, root)
    for name in (INDEX, SINGLE):
        path = posixpath.join(root, name)
        if files.size(path) is not None:
            return _read_index(files, path) if name == INDEX else ((path,), None)
    listed = files.list()
    if listed is None:
        raise CheckpointError(
            f"{root} has neither {INDEX} nor {SINGLE}, and its files cannot be listed; name one of its files"
        )
    indices = [path for path in listed if path.endswith(f"{SUFFIX}.index.json")]
    if len(indices) == 1:
        return _read_index(files, indices[0])
    if shards := tuple(sorted(path for path in listed if path.endswith(SUFFIX))):
        return shards, None
    names = sorted(posixpath.basename(path) for path in listed)
    there = f"it holds {', '.join(names[:_NAMED])}{' ...' if len(names) > _NAMED else ''}" if names else "it is empty"
    raise CheckpointError(
        f"folder {root} holds no {SUFFIX} file: {there}. Save the model with save_pretrained(..., safe_serialization=True)"
    )


def _read_index(files: Files, path: str) -> tuple[tuple[str, ...], Mapping[str, str]]:
    size = files.size(path)
    if size is None:
        raise CheckpointError(f"there is no file {path}")
    try:
        names = json.loads(files.read(path, 0, size))["weight_map"]
        promised = {str(tensor): posixpath.join(posixpath.dirname(path), str(shard)) for tensor, shard in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"index {path} has no weight_map from tensor to file: {error}") from error
    shards = tuple(sorted(set(promised.values())))
    missing = [posixpath.basename(shard) for shard in shards if files.size(shard) is None]
    if missing:
        raise CheckpointError(
            f"index {path} names {len(missing)} of {len(shards)} files that are not there: {_some(missing)}; copy the checkpoint whole"
        )
    return shards, promised


def _check_index(promised: Mapping[str, str], found: Mapping[str, StoredTensor]) -> None:
    for name, path in sorted(promised.items()):
        if name not in found or found[name].path != path:
            where = f"it is in {found[name].path}" if name in found else "no file holds it"
            raise CheckpointError(f"the index promises tensor {name} in {path}, but {where}")
    strangers = sorted(found.keys() - promised.keys())
    if strangers:
        raise CheckpointError(f"the index does not name {_some(strangers)}, which {found[strangers[0]].path} holds")


def _read_header(files: Files, path: str) -> list[StoredTensor]:
    size = files.size(path)
    if size is None:
        raise CheckpointError(f"there is no file {path}")
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, which is no safetensors file")
    length = int.from_bytes(files.read(path, 0, 8), "little")
    if length > min(size - 8, _MOST_HEADER_BYTES):
        raise CheckpointError(
            f"{path} says that its header has {length} bytes, but the file has {size}: it is no safetensors file, or was cut off"
        )
    try:
        header: dict[str, Any] = json.loads(files.read(path, 8, 8 + length))
        header.pop("__metadata__", None)
        tensors = [_stored(path, 8 + length, name, entry) for name, entry in header.items()]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {path} cannot be understood: {type(error).__name__}: {error}") from error
    for tensor in tensors:
        end = tensor.begin + tensor.spec.nbytes
        if end > size:
            raise CheckpointError(
                f"tensor {tensor.spec.name} ends at byte {end} of {path}, which has {size}: the file was cut off"
            )
    return sorted(tensors, key=lambda tensor: tensor.begin)


def _stored(path: str, data: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    kind = str(entry["dtype"])
    if kind not in _DTYPES:
        raise CheckpointError(
            f"tensor {name} of {path} has dtype {kind}; those that can be sent are {', '.join(sorted(_DTYPES))}. Convert the checkpoint"
        )
    spec = TensorSpec(name=name, dtype=_DTYPES[kind], shape=tuple(entry["shape"]))
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if begin < 0 or end - begin != prod(spec.shape) * DTYPE_BYTES[spec.dtype]:
        raise CheckpointError(
            f"tensor {name} of {path} has {end - begin} bytes; {kind} {list(spec.shape)} takes {spec.nbytes}"
        )
    return StoredTensor(spec, path, data + begin)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
