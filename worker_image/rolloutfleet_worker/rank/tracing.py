"""What vLLM's loader does with each source tensor, seen by running it on a shadow model over tensors that have shapes but no data.

All views of a tensor share its storage, so that at a copy the storage names the source, and offset, shape and strides name the part:
no list of view operations is needed. Whatever is no view gives a new storage, which is noted as computed from its arguments.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rolloutfleet.contract.manifest import TensorSpec

LOADER_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What vLLM's loaders raise for tensors that they do not take."""

_ATEN = torch.ops.aten
_FILLS = {_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default}


class Region(NamedTuple):
    """Part of a tensor's storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Write(NamedTuple):
    """A region of a parameter that the loader wrote: copied from a region of a source, or filled with one value."""

    region: Region
    source: str | None
    source_region: Region | None


class _Derived(NamedTuple):
    """A tensor that was computed."""

    operation: str
    sources: frozenset[str]


class LoadTrace(TorchDispatchMode):
    """Runs the loader and notes, by storage, what is read from each source and written to each parameter and buffer."""

    def __init__(self, shadow: torch.nn.Module, specs: list[TensorSpec]) -> None:
        super().__init__()
        self._shadow = shadow
        self._specs = specs
        self._sources = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
        }
        self._source_of = {_key(tensor): name for name, tensor in self._sources.items()}
        self._target_of = {_key(tensor): name for name, tensor in shadow.named_buffers()}
        self._target_of |= {_key(tensor): name for name, tensor in shadow.named_parameters()}
        self._before = dict(shadow.named_parameters())
        self._derived: dict[int, _Derived] = {}
        # Derived tensors stay alive until the trace is over: the key of a freed storage is given to the next one.
        self._kept: list[torch.Tensor] = []
        self._kinds: dict[Any, str] = {}
        self.writes: dict[str, list[Write]] = defaultdict(list)
        """By parameter or buffer, in the order of writing."""
        self.computed: dict[str, str] = {}
        """Parameters and buffers that the loader computes instead of copying, with the operation."""
        self.computed_from: dict[str, set[str]] = defaultdict(set)
        """The sources that those are computed from."""
        self.altered: dict[str, str] = {}
        """Sources that the loader changes before it reads them, with the operation."""
        self.read: dict[str, int] = defaultdict(int)
        """Elements that were taken from each source."""

    def run(self) -> tuple[TensorSpec | None, Exception | None]:
        """The tensor that the loader refused and its error, or None twice when it took all."""
        current: list[TensorSpec] = []

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in self._specs:
                current[:] = [spec]
                yield spec.name, self._sources[spec.name]
            current.clear()

        try:
            with torch.no_grad(), self:
                self._shadow.load_weights(feed())
        except LOADER_ERRORS as error:
            if not current:
                raise
            return current[0], error
        self._note_replaced()
        return None, None

    def written_elements(self, target: str) -> int:
        return sum(region.elements for region in {write.region for write in self.writes.get(target, ())})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.copy_.default or func in _FILLS:
            target = self._target_of.get(_key(args[0]))
            if target is not None:
                if func in _FILLS:
                    self.writes[target].append(Write(_region(args[0]), None, None))
                else:
                    self._note_copy(target, args[0], args[1])
                return args[0]
        result = func(*args, **(kwargs or {}))
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if kind != "view":
            given = [*args, *(kwargs or {}).values()]
            self._note_operation(func, given, [result] if kind == "compute" else _changed(func, args, kwargs or {}))
        return result

    def _note_copy(self, target: str, region: torch.Tensor, value: torch.Tensor) -> None:
        key = _key(value)
        if (source := self._source_of.get(key)) is not None:
            if value.shape != region.shape:
                value = value.expand(region.shape)
            self.writes[target].append(Write(_region(region), source, _region(value)))
            self.read[source] += region.numel()
            return
        derived = self._derived.get(key, _Derived("copies what is no source tensor", frozenset()))
        self.writes[target].append(Write(_region(region), None, None))
        self._note_computed(target, derived)

    def _note_computed(self, target: str, derived: _Derived) -> None:
        self.computed.setdefault(target, derived.operation)
        self.computed_from[target] |= derived.sources
        for source in derived.sources:
            self.read[source] = self._sources[source].numel()

    def _note_operation(self, func: Any, inputs: list[Any], outputs: list[Any]) -> None:
        keys = [_key(tensor) for tensor in _tensors(inputs)]
        sources = {self._source_of[key] for key in keys if key in self._source_of}
        earlier = [self._derived[key] for key in keys if key in self._derived]
        if not sources and not earlier and not any(key in self._target_of for key in keys):
            return
        name = str(func).removeprefix("aten.").partition(".")[0]
        derived = _Derived(name, frozenset(sources).union(*(each.sources for each in earlier)))
        for tensor in _tensors(outputs):
            key = _key(tensor)
            if (target := self._target_of.get(key)) is not None:
                self._note_computed(target, derived)
            elif (source := self._source_of.get(key)) is not None:
                self.altered.setdefault(source, name)
            else:
                self._derived[key] = derived
                self._kept.append(tensor)

    def _note_replaced(self) -> None:
        """A loader may put another tensor in a parameter's place, or add one, and no operation shows it."""
        for name, parameter in self._shadow.named_parameters():
            if self._before.get(name) is not parameter or self._target_of.get(_key(parameter)) is None:
                key = _key(parameter)
                source = self._source_of.get(key)
                sources = frozenset() if source is None else frozenset({source})
                self._note_computed(name, self._derived.get(key, _Derived("replaces the parameter", sources)))


def _kind(func: Any) -> str:
    """``write`` when an argument is changed, ``view`` when the result shares an argument's storage, else ``compute``."""
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
        return "write"
    return "view" if any(value.alias_info is not None for value in func._schema.returns) else "compute"


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [given[name] for name in changed if name in given]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _region(tensor: torch.Tensor) -> Region:
    return Region(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
