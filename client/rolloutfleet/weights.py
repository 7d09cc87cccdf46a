"""The tensors that a trainer hands over, and the manifest that describes them."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rolloutfleet.contract.manifest import DTYPE_BYTES, Manifest, TensorSpec

if TYPE_CHECKING:
    import torch


class NamedTensors:
    """Named tensors that can be read again and again in one order.

    ``tensors`` is an ``nn.Module`` (its parameters; tied ones once, under their first name), a mapping from name to tensor, or an
    iterable of (name, tensor) that starts anew each time it is iterated. Raises TypeError for a generator, because tensors are read
    twice (to describe and to send), and ValueError naming the tensor that cannot be sent.
    """

    def __init__(self, tensors: Any) -> None:
        if isinstance(tensors, Iterator):
            raise TypeError(
                f"tensors is a {type(tensors).__name__}, which can be read only once; "
                "pass the module itself, a mapping, or a list of (name, tensor)"
            )
        if not (_is_module(tensors) or hasattr(tensors, "__iter__")):
            raise TypeError(
                f"tensors is a {type(tensors).__name__}; pass an nn.Module, a mapping from name to tensor, "
                "or a list of (name, tensor)"
            )
        self._tensors = tensors

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        if _is_module(self._tensors):
            return iter(self._tensors.named_parameters())
        if isinstance(self._tensors, Mapping):
            return iter(self._tensors.items())
        return iter(self._tensors)

    def manifest(self) -> Manifest:
        """Name, dtype and shape of every tensor, in sending order."""
        try:
            return Manifest(tensors=tuple(_describe(name, tensor) for name, tensor in self))
        except ValidationError as error:
            reasons = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            raise ValueError(f"these tensors cannot be sent: {reasons}") from error

    def checked(self, manifest: Manifest) -> "Iterator[tuple[TensorSpec, torch.Tensor]]":
        """Every tensor with its line of the manifest; ValueError naming the first one that no longer fits it."""
        position = 0
        for name, tensor in self:
            if position == len(manifest.tensors):
                raise ValueError(f"tensor {name} came after the {position} that the manifest names")
            spec, found = manifest.tensors[position], _describe(name, tensor)
            if spec != found:
                raise ValueError(
                    f"tensor {position} was {_line(spec)} when the refit began and is {_line(found)} now; "
                    "keep names, dtypes and shapes still until refit() returns"
                )
            position += 1
            yield spec, tensor
        if position < len(manifest.tensors):
            raise ValueError(
                f"only {position} of {len(manifest.tensors)} tensors came; the next is {_line(manifest.tensors[position])}"
            )


def _is_module(tensors: Any) -> bool:
    return callable(getattr(tensors, "named_parameters", None))


def _describe(name: str, tensor: Any) -> TensorSpec:
    if callable(getattr(tensor, "full_tensor", None)):
        raise ValueError(  # noqa: TRY004 - one kind for tensors that cannot be sent
            f"tensor {name} is sharded over processes (DTensor); gather it first with full_tensor() on every rank, "
            "and call refit() on one of them"
        )
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(
            f"tensor {name} has dtype {dtype}; those that can be sent are {', '.join(sorted(DTYPE_BYTES))}"
        )
    if getattr(getattr(tensor, "device", None), "type", "") == "meta":
        raise ValueError(f"tensor {name} is on the meta device and holds no data")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(int(size) for size in tensor.shape))


def _line(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"
