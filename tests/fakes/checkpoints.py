"""Checkpoints in safetensors format, whole or damaged, written without the library that reads them elsewhere."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KINDS = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}


def write_file(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], cut: int = 0) -> Path:
    """A file of tensors (dtype as in the format, shape, bytes) in the mapping's order; ``cut`` bytes of its end are missing."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content[: len(content) - cut])
    return path


def write_index(folder: Path, weight_map: Mapping[str, str]) -> Path:
    """The index of a checkpoint of several files."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
    return path


def write_torch(path: Path, tensors: Mapping[str, Any]) -> Path:
    """A file of torch tensors in the mapping's order."""
    import torch

    def raw(tensor: Any) -> bytes:
        return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())

    described = {
        name: (KINDS[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), raw(tensor))
        for name, tensor in tensors.items()
    }
    return write_file(path, described)
