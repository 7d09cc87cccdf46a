"""What a trainer is about to send: name, dtype and shape of every tensor, in sending order."""

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""Bytes per element of each torch dtype that may be sent, by its name without the ``torch.`` prefix."""


class TensorSpec(BaseModel):
    """One tensor as it crosses the wire."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    dtype: str
    shape: tuple[int, ...]

    @model_validator(mode="after")
    def _known_dtype_and_shape(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name}: shape {list(self.shape)} holds a negative size")
        return self

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


class Manifest(BaseModel):
    """All tensors of one weight version, in the order in which they are sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: tuple[TensorSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        repeated = sorted(repeated_names([tensor.name for tensor in self.tensors]))
        if repeated:
            raise ValueError(f"manifest names these tensors more than once: {', '.join(repeated)}")
        return self

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def digest(self) -> str:
        """Hex SHA-256 of names, dtypes and shapes in order: equal digests mean interchangeable manifests."""
        lines = "\n".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in self.tensors)
        return hashlib.sha256(lines.encode()).hexdigest()


class ManifestFaults(BaseModel):
    """Why a worker cannot load a manifest, tensor by tensor; empty lists mean that it can."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    """Sentences that name the tensor, its shape and the shape that fits."""
    adapter: tuple[str, ...] = ()
    """Sentences about an adapter as a whole."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.misshapen or self.adapter)

    def sentence(self) -> str:
        """The faults in one line, each tensor named."""
        parts = list(self.adapter)
        parts += [f"missing: {', '.join(self.missing)}"] if self.missing else []
        parts += [f"extra: {', '.join(self.extra)}"] if self.extra else []
        parts += [f"wrong shape: {'; '.join(self.misshapen)}"] if self.misshapen else []
        return "; ".join(parts)


def repeated_names(names: Sequence[str]) -> set[str]:
    """The names that stand in the sequence more than once."""
    seen: set[str] = set()
    return {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
