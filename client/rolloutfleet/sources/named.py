"""Tensors by name: an nn.Module, a mapping or a list; plain tensors, or DTensors of which this process holds a part."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolloutfleet.sources.local import Box, Entry, LocalSource, dtype_of
from rolloutfleet.sources.mesh import dtensor_entry


class NamedTensors(LocalSource):
    """Named tensors that can be read again and again in one order.

    ``tensors`` is an ``nn.Module`` (its parameters; tied ones once, under their first name), a mapping from name to tensor, or an
    iterable of (name, tensor) that starts anew each time it is iterated. DTensors, as FSDP2 makes them, are taken only when ``sharded``:
    every rank of the trainer's team then gives the part that it holds. Raises TypeError for a generator, because tensors are read
    twice (to describe and to send), and ValueError naming the tensor that cannot be sent.
    """

    def __init__(self, tensors: Any, *, sharded: bool = False) -> None:
        super().__init__()
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
        self._sharded = sharded

    def entries(self) -> Iterator[Entry]:
        """The tensors as they are now; ValueError naming one that cannot be sent."""
        for name, tensor in self._named():
            yield self._entry(name, tensor)

    def _named(self) -> Iterator[tuple[str, Any]]:
        if _is_module(self._tensors):
            return iter(self._tensors.named_parameters())
        if isinstance(self._tensors, Mapping):
            return iter(self._tensors.items())
        return iter(self._tensors)

    def _entry(self, name: str, tensor: Any) -> Entry:
        if callable(getattr(tensor, "full_tensor", None)):
            if not self._sharded:
                raise ValueError(
                    f"tensor {name} is sharded over processes (DTensor); connect with team= and call refit() on every rank of that "
                    "process group, or gather it first with full_tensor() on every rank and call refit() on one of them"
                )
            return dtensor_entry(name, tensor)
        dtype = dtype_of(name, tensor)
        shape = tuple(tensor.shape)
        return Entry(name, dtype, shape, (Box(tensor, (0,) * len(shape)),))


def _is_module(tensors: Any) -> bool:
    return callable(getattr(tensors, "named_parameters", None))
