"""What tables of copies and of sums have in common: tensors, the tiles over them, and the tiles' present addresses."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import torch

from rolloutfleet.tiles.cutting import Geometry, Tiles, cut, measure

if TYPE_CHECKING:
    from rolloutfleet.layout.blocks import Block
    from rolloutfleet.tiles.kernels import Launch

TILE_BYTES: Final = 64 << 10
"""What one program of a kernel takes: small enough to fill a GPU evenly, so large that a table weighs 0.1 % of what it moves."""

CACHED_BYTES: Final = 4 << 20
"""What a thread takes at a time on a CPU: what it has copied is in some cache still when it is summed."""

_SHARED_BYTES: Final = 16 << 20
"""Tables of fewer bytes are not worth a second thread on a CPU."""

_WIDEST: Final = 16


class Item(NamedTuple):
    """Blocks that correspond element by element: one of each tensor, then perhaps their place in a whole source tensor.

    ``unit`` is 0 where nothing is summed.
    """

    tensors: tuple[torch.Tensor, ...]
    blocks: tuple["Block", ...]
    source: int = 0
    unit: int = 0


@dataclass(frozen=True, slots=True)
class Strip:
    """One tile on a CPU: views [rows, elements] of each tensor, and which words of the source tensor they hold."""

    views: tuple[torch.Tensor, ...]
    source: int
    unit: int
    first: int
    step: int


class Table:
    """Tiles over tensors, ready to run on their device; keeps the tensors alive."""

    _copies: ClassVar[bool]
    _adds: ClassVar[bool]

    def __init__(self, items: Sequence[Item], device: torch.device | None = None) -> None:
        self.device = _check(items, device)
        self.nbytes = sum(item.blocks[0].rows * item.blocks[0].run * item.tensors[0].element_size() for item in items)
        self._items = tuple(items)
        self._kernels = runs_kernels(self.device)
        self._geometry = measure([(item.blocks, item.tensors[0].element_size()) for item in items])
        _check_units(self._geometry, self._items)
        self._launches: tuple[Launch, ...] = ()
        self._strips: tuple[Strip, ...] = ()
        self._ready: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._make()

    def _launch(self, sums: torch.Tensor | None) -> None:
        with self._on_device():
            self._await_ready()
            for launch in self._launches:
                launch.run(sums, copies=self._copies)

    def _await_ready(self) -> None:
        """Runs may follow on any stream; on the one that made the table they are behind it anyway."""
        if self._ready is not None:
            made_on, made = self._ready
            stream = torch.cuda.current_stream(self.device)
            if stream != made_on:
                stream.wait_event(made)

    @property
    def _threads(self) -> int | None:
        """How many threads run a table on a CPU, as :func:`rolloutfleet.tiles.hostwork.share_out` takes it."""
        return 1 if self.nbytes < _SHARED_BYTES else None

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _make(self) -> None:
        tiles = cut(self._geometry, TILE_BYTES if self._kernels else CACHED_BYTES, self.device)
        if self._kernels:
            self._launches = _launches(tiles, self._items)
            with self._on_device():
                for launch in self._launches:
                    launch.compile(copies=self._copies, adds=self._adds)
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                self._ready = stream, stream.record_event()
        else:
            self._strips = _strips(tiles, self._items)


def runs_kernels(device: torch.device) -> bool:
    """Whether tables on this device run as Triton kernels: on GPUs, and everywhere in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _launches(tiles: Tiles, items: Sequence[Item]) -> tuple["Launch", ...]:
    """One launch for all tiles that have vector width, word and shape in common."""
    from rolloutfleet.tiles.kernels import Launch

    if not items:
        return ()
    tensors, device = len(items[0].tensors), tiles.rows.device
    bases = torch.tensor([[tensor.data_ptr() for tensor in item.tensors] for item in items], dtype=torch.int64)
    meaning = torch.tensor([[item.source, max(1, item.unit)] for item in items], dtype=torch.int64)
    address = bases.to(device)[tiles.entry] + tiles.start[:, :tensors]
    source, unit = meaning.to(device)[tiles.entry].unbind(1)
    bits = tiles.run | _WIDEST
    for column in (*address.unbind(1), *tiles.step[:, :tensors].unbind(1)):
        bits = bits | column
    width = bits & -bits
    per_row = tiles.run // width
    table = torch.stack(
        (
            address[:, 0],
            address[:, -1],
            tiles.rows * per_row,
            per_row,
            tiles.step[:, 0] // width,
            tiles.step[:, tensors - 1] // width,
            tiles.start[:, -1] // unit,
            tiles.step[:, -1] // unit,
            source,
        ),
        1,
    )
    kind = (width << 4) | (unit << 1) | (tiles.rows > 1)
    return tuple(
        Launch(table[kind == value], width=value >> 4, unit=value >> 1 & 7, strided=bool(value & 1))
        for value in torch.unique(kind).tolist()
    )


def _strips(tiles: Tiles, items: Sequence[Item]) -> tuple[Strip, ...]:
    flats = [tuple(tensor.detach().view(-1) for tensor in item.tensors) for item in items]
    strips: list[Strip] = []
    for start, step, rows, run, entry in zip(
        tiles.start.tolist(),
        tiles.step.tolist(),
        tiles.rows.tolist(),
        tiles.run.tolist(),
        tiles.entry.tolist(),
        strict=True,
    ):
        item, size = items[entry], items[entry].tensors[0].element_size()
        views = tuple(
            flat.as_strided((rows, run // size), (step[at] // size, 1), flat.storage_offset() + start[at] // size)
            for at, flat in enumerate(flats[entry])
        )
        unit = max(1, item.unit)
        strips.append(Strip(views, item.source, item.unit, first=start[-1] // unit, step=step[-1] // unit))
    return tuple(strips)


def _check(items: Sequence[Item], device: torch.device | None) -> torch.device:
    """The one device of all tensors."""
    device = items[0].tensors[0].device if items else device or torch.device("cpu")
    for number, item in enumerate(items):
        dtype = item.tensors[0].dtype
        for tensor, block in zip(item.tensors, item.blocks, strict=False):
            if tensor.device != device:
                raise ValueError(
                    f"entry {number}: tensor on {tensor.device} among tensors on {device}; a table has one device"
                )
            if tensor.dtype != dtype:
                raise ValueError(f"entry {number}: {tensor.dtype} beside {dtype}; cast the source first")
            _check_contiguous(number, tensor)
            end = block.offset + (block.rows - 1) * block.stride + block.run
            if end > tensor.numel():
                raise ValueError(f"entry {number}: {block} ends at element {end} of a tensor of {tensor.numel()}")
    return device


def _check_contiguous(number: int, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"entry {number}: tensor of shape {list(tensor.shape)} has strides {list(tensor.stride())}; blocks count the elements of a "
            "contiguous tensor"
        )


def _check_units(geometry: Geometry, items: Sequence[Item]) -> None:
    """Words must not straddle runs, nor begin between two words of the source tensor; where they lie in memory does not matter."""
    words = torch.tensor([max(1, item.unit) for item in items], dtype=torch.int64).view(-1, 1)
    unfit = (geometry.run % words).any(1) | ((geometry.offset | geometry.stride)[:, -1:] % words).any(1)
    for number in unfit.nonzero().flatten().tolist():
        item = items[number]
        raise ValueError(
            f"entry {number}: words of {item.unit} bytes do not divide {', '.join(map(str, item.blocks))} of elements of "
            f"{item.tensors[0].element_size()} bytes; take a smaller unit for source tensor {item.source}"
        )
