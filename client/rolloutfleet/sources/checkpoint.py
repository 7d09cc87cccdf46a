"""A checkpoint as the source of a refit, without ever holding it whole.

Files of this machine are mapped into memory: what is sent leaves from there, and the kernel drops pages as it likes. Remote files are read
tensor by tensor, of which a bounded amount is kept, because the slices of one tensor may be sent at several moments.
"""

import mmap
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from rolloutfleet.contract.manifest import DTYPE_BYTES, Manifest, TensorSpec
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings, whole_holdings
from rolloutfleet.sources.reading import move, read_region
from rolloutfleet.sources.regions import Region, row_major
from rolloutfleet.sources.safetensors import CheckpointError, Files, StoredTensor, find_tensors
from rolloutfleet.sources.source import Span
from rolloutfleet.sources.storage import LocalFiles, open_files

if TYPE_CHECKING:
    import torch

KEPT_BYTES: Final = 1 << 30
"""Of remote tensors that are kept for the next slice; one tensor that is larger is kept alone."""


def open_checkpoint(place: str) -> "Checkpoint":
    """The checkpoint at a path of this machine or a URI; its headers are read now, its tensors when they are sent.

    Raises CheckpointError.
    """
    return Checkpoint(open_files(place))


class Checkpoint:
    """A :class:`~rolloutfleet.sources.source.WeightSource` of all tensors of a checkpoint, for one trainer rank."""

    def __init__(self, files: Files, kept_bytes: int = KEPT_BYTES) -> None:
        tensors = find_tensors(files)
        self._files = files
        self._stored = {tensor.spec.name: tensor for tensor in tensors}
        self._store: _Mapped | _Fetched = _Mapped() if isinstance(files, LocalFiles) else _Fetched(files, kept_bytes)
        try:
            self._manifest = Manifest(tensors=tuple(tensor.spec for tensor in tensors))
        except ValidationError as error:
            raise CheckpointError(f"checkpoint {files.root}: {error.errors()[0]['msg']}") from error

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return len(self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._manifest.nbytes

    def manifest(self, known: Manifest | None = None) -> Manifest:
        return known if known == self._manifest else self._manifest

    def bind(self, manifest: Manifest) -> None:
        if manifest != self._manifest:
            raise ValueError(
                "a checkpoint is sent whole by one trainer rank; its manifest is not the one that was asked for"
            )

    def gpu(self) -> int | None:
        return None

    def shareable(self) -> bool:
        return False

    def addresses(self) -> Hashable:
        return id(self)

    def holdings(self, rank: int, ranks: int) -> Holdings:
        if ranks != 1:
            raise ValueError(f"a checkpoint is sent by one trainer rank, and this team has {ranks}")
        return whole_holdings(self._manifest, rank)

    def spans(self, source: int, block: Block) -> tuple[Span, ...] | None:
        tensor = self._store.lasting(self._at(source))
        return None if tensor is None else (Span(tensor.view(-1), block),)

    def read(
        self, source: int, block: Block, dtype: "torch.dtype | None" = None, device: "torch.device | None" = None
    ) -> "torch.Tensor":
        tensor = self._store.tensor(self._at(source))
        shape = tuple(tensor.shape)
        region = Region(whole=shape, start=(0,) * len(shape), shape=shape, strides=row_major(shape))
        return move(read_region(tensor, region, block), dtype or tensor.dtype, device or tensor.device)

    def whole(self) -> "Iterator[tuple[TensorSpec, torch.Tensor]]":
        for source, spec in enumerate(self._manifest.tensors):
            yield spec, self._store.tensor(self._at(source))

    def _at(self, source: int) -> StoredTensor:
        return self._stored[self._manifest.tensors[source].name]


class _Mapped:
    """Tensors in files that are mapped into memory; a write to one would never reach its file."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(self, stored: StoredTensor) -> "torch.Tensor":
        name = stored.spec.name
        if name in self._tensors:
            return self._tensors[name]
        tensor = _tensor_of(self._map(stored.path), stored, stored.begin)
        if _is_aligned(stored):
            self._tensors[name] = tensor
        return tensor

    def lasting(self, stored: StoredTensor) -> "torch.Tensor | None":
        """The tensor, which stays where it is for as long as this lives; None for one that has to be copied to be used."""
        return self.tensor(stored) if _is_aligned(stored) else None

    def _map(self, path: str) -> mmap.mmap:
        if path not in self._maps:
            with Path(path).open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]


class _Fetched:
    """Tensors that are read whole when a part of them is wanted, the last ones kept."""

    def __init__(self, files: Files, kept_bytes: int) -> None:
        self._files = files
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    def tensor(self, stored: StoredTensor) -> "torch.Tensor":
        name = stored.spec.name
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        held = sum(tensor.nbytes for tensor in self._kept.values())
        while self._kept and held + stored.spec.nbytes > self._kept_bytes:
            held -= self._kept.popitem(last=False)[1].nbytes
        data = self._files.read(stored.path, stored.begin, stored.begin + stored.spec.nbytes)
        tensor = self._kept[name] = _tensor_of(bytearray(data), stored, 0)
        return tensor

    def lasting(self, _: StoredTensor) -> "torch.Tensor | None":
        """None: whatever is kept may go."""
        return None


def _is_aligned(stored: StoredTensor) -> bool:
    return stored.begin % DTYPE_BYTES[stored.spec.dtype] == 0


def _tensor_of(buffer: "mmap.mmap | bytearray", stored: StoredTensor, begin: int) -> "torch.Tensor":
    """The tensor in the buffer's own memory, or in a copy where it does not lie at a multiple of its element's size."""
    import torch

    spec = stored.spec
    dtype = getattr(torch, spec.dtype)
    if not spec.elements:
        return torch.empty(spec.shape, dtype=dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=spec.nbytes, offset=begin)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(spec.shape)
