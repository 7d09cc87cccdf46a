"""Tensors as boxes of local memory: what every kind of source comes down to."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from rolloutfleet.contract.manifest import DTYPE_BYTES, Manifest, TensorSpec
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings, Piece
from rolloutfleet.sources.reading import move, read_region
from rolloutfleet.sources.regions import Region
from rolloutfleet.sources.source import Span

if TYPE_CHECKING:
    import torch


# Thousands of these are made for a refit, and tuples are made fastest.
class Box(NamedTuple):
    """A local tensor, and the indices in the whole tensor at which it begins."""

    tensor: "torch.Tensor"
    start: tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of a source: what it is as a whole, and the boxes of it that lie here."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"

    def fits(self, spec: TensorSpec) -> bool:
        """Whether the manifest's line says the same."""
        return self.name == spec.name and self.dtype == spec.dtype and self.shape == spec.shape


class LocalSource(ABC):
    """A :class:`~rolloutfleet.sources.source.WeightSource` of tensors, or boxes of them, that lie in this process."""

    def __init__(self) -> None:
        self._described: Manifest | None = None
        self._manifest: Manifest | None = None
        self._gpu: int | None = None
        self._first = 0
        self._held: tuple[Entry | None, ...] = ()
        self._regions: dict[int, tuple[tuple[Box, Region], ...]] = {}
        self._addresses: Hashable = None

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """The tensors as they are now, in sending order; ValueError naming one that cannot be sent."""

    def manifest(self, known: Manifest | None = None) -> Manifest:
        entries = list(self.entries())
        if known is None or not _says_the_same(entries, known):
            known = _described(entries)
        self._described = known
        self._gpu, self._first = _place_of(entries)
        return known

    def bind(self, manifest: Manifest) -> None:
        described = self._described or self.manifest()
        found = {entry.name: entry for entry in _checked(self.entries(), described)}
        self._held = tuple(found.pop(spec.name, None) for spec in manifest.tensors)
        if found:
            raise ValueError(f"the manifest does not name {', '.join(sorted(found))}, which this trainer rank holds")
        self._manifest = manifest
        self._regions = {}
        self._addresses = None

    def gpu(self) -> int | None:
        return self._gpu

    def shareable(self) -> bool:
        if self._gpu is None:
            return True
        from rolloutfleet.transport.cudaipc import is_shareable

        return is_shareable(self._first, self._gpu)

    def addresses(self) -> Hashable:
        if self._addresses is None:
            tensors = [box.tensor for entry in self._held if entry is not None for box in entry.boxes]
            # Column by column: numbers, types and tuples of numbers compare much faster among their own kind.
            self._addresses = (
                tuple([tensor.data_ptr() for tensor in tensors]),
                tuple([tensor.dtype for tensor in tensors]),
                tuple([tensor.shape for tensor in tensors]),
                tuple([tensor.stride() for tensor in tensors]),
            )
        return self._addresses

    def holdings(self, rank: int, ranks: int) -> Holdings:
        if not 0 <= rank < ranks:
            raise ValueError(f"trainer rank {rank} does not exist among {ranks}")
        return Holdings(
            rank=rank,
            pieces=tuple(
                Piece(source=source, block=block)
                for source in range(len(self._held))
                for _, region in self._boxes(source)
                for block in region.pieces()
            ),
        )

    def spans(self, source: int, block: Block) -> tuple[Span, ...] | None:
        box, region = self._find(source, block)
        located = region.locate(block)
        if located is None:
            return None
        flat = box.tensor.detach().as_strided((region.extent,), (1,))
        return tuple(Span(flat, local) for local in located)

    def read(
        self, source: int, block: Block, dtype: "torch.dtype | None" = None, device: "torch.device | None" = None
    ) -> "torch.Tensor":
        box, region = self._find(source, block)
        return move(read_region(box.tensor, region, block), dtype or box.tensor.dtype, device or box.tensor.device)

    def whole(self) -> "Iterator[tuple[TensorSpec, torch.Tensor]]":
        tensors = self._manifest.tensors if self._manifest is not None else ()
        for spec, entry in zip(tensors, self._held, strict=True):
            boxes = entry.boxes if entry is not None else ()
            if len(boxes) != 1 or tuple(boxes[0].tensor.shape) != spec.shape:
                raise ValueError(
                    f"this trainer rank holds {'only a part' if boxes else 'no part'} of tensor {spec.name}, and the fleet's transport "
                    "sends whole tensors from one rank; set spec.refit.transport to Auto or Layout"
                )
            yield spec, boxes[0].tensor.detach()

    def _find(self, source: int, block: Block) -> tuple[Box, Region]:
        for box, region in self._boxes(source):
            if region.holds(block):
                return box, region
        entry = self._held[source]
        raise ValueError(f"this trainer rank does not hold {block} of tensor {entry or f'number {source}'}")

    def _boxes(self, source: int) -> tuple[tuple[Box, Region], ...]:
        known = self._regions.get(source)
        if known is None:
            entry = self._held[source]
            boxes = entry.boxes if entry is not None else ()
            known = tuple((box, region_of(box, entry.shape if entry is not None else ())) for box in boxes)
            self._regions[source] = known
        return known


def region_of(box: Box, whole: tuple[int, ...]) -> Region:
    """The box's geometry; ValueError when it does not lie within the whole shape."""
    return Region(whole=whole, start=box.start, shape=tuple(box.tensor.shape), strides=tuple(box.tensor.stride()))


_names: dict[Any, str] = {}


def dtype_of(name: str, tensor: "torch.Tensor") -> str:
    """The dtype's name in manifests; ValueError for one that cannot be sent, or for a tensor without data."""
    given = getattr(tensor, "dtype", None)
    dtype = _names.get(given)
    if dtype is None:
        dtype = _names[given] = str(given).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(
            f"tensor {name} has dtype {dtype}; those that can be sent are {', '.join(sorted(DTYPE_BYTES))}"
        )
    if getattr(tensor, "is_meta", False):
        raise ValueError(f"tensor {name} is on the meta device and holds no data")
    return dtype


def _place_of(entries: Sequence[Entry]) -> tuple[int | None, int]:
    """The GPU of the first tensor, and its address there; no GPU when it lies in the host's memory."""
    tensor = next((box.tensor for entry in entries for box in entry.boxes[:1]), None)
    device = getattr(tensor, "device", None)
    if tensor is None or device is None or device.type != "cuda":
        return None, 0
    return device.index, tensor.data_ptr()


def _says_the_same(entries: Sequence[Entry], known: Manifest) -> bool:
    return len(entries) == len(known.tensors) and all(map(Entry.fits, entries, known.tensors))


def _described(entries: Sequence[Entry]) -> Manifest:
    try:
        return Manifest(
            tensors=tuple(TensorSpec(name=entry.name, dtype=entry.dtype, shape=entry.shape) for entry in entries)
        )
    except ValidationError as error:
        reasons = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise ValueError(f"these tensors cannot be sent: {reasons}") from error


def _checked(entries: Iterator[Entry], manifest: Manifest) -> Iterator[Entry]:
    """The entries, as long as they are those of the manifest."""
    total = len(manifest.tensors)
    for position, (spec, entry) in enumerate(zip_longest(manifest.tensors, entries)):
        if entry is None:
            raise ValueError(f"only {position} of {total} tensors came; the next is {_line(spec)}")
        if spec is None:
            raise ValueError(f"tensor {entry.name} came after the {total} that the manifest names")
        if not entry.fits(spec):
            raise ValueError(
                f"tensor {position} was {_line(spec)} when the refit began and is {entry} now; "
                "keep names, dtypes and shapes still until refit() returns"
            )
        yield entry


def _line(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"
