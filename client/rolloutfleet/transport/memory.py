"""The Colocated transport's memory: a trainer rank shows its tensors, a worker rank on the same machine maps them.

On a GPU the tensors themselves are shown, by one CUDA handle for each segment of torch's allocator that holds any of them, however many
tensors there are. On a CPU they are copied into one shared file that is kept between refits. A worker maps each segment once, uses the
mapping again while the segment is the same, and lets go of it as soon as a later message no longer names it.

Nobody counts readers: the trainer neither frees, moves nor overwrites what it has shown before the slowest worker has answered for it.
"""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rolloutfleet.locality import CPU, device_name
from rolloutfleet.tiles.hostwork import copy_in_host
from rolloutfleet.transport import cudaipc
from rolloutfleet.transport.sharedfile import SharedFile, map_file, remove_orphans

_FORMAT: Final = 1
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of memory: a CUDA allocation by its handle in base64, or a shared file by its name."""

    device: str
    """What :func:`~rolloutfleet.locality.device_name` gives."""
    handle: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's elements lie, one after the other: from byte ``offset`` of a segment."""

    segment: int
    offset: int
    elements: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def nbytes(self) -> int:
        return self.elements * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Export:
    """What a trainer rank shows."""

    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]

    def encode(self) -> bytes:
        return json.dumps(
            {
                "format": _FORMAT,
                "segments": [[segment.device, segment.handle, segment.nbytes] for segment in self.segments],
                "tensors": [
                    [span.segment, span.offset, span.elements, str(span.dtype).removeprefix("torch.")]
                    for span in self.spans
                ],
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Export":
        """The export of a message; raises ValueError that names what is wrong with it."""
        try:
            content = json.loads(message)
            release = content["format"]
            segments = tuple(
                Segment(str(device), str(handle), int(size)) for device, handle, size in content["segments"]
            )
            spans = tuple(
                Span(int(segment), int(offset), int(elements), _dtype(dtype))
                for segment, offset, elements, dtype in content["tensors"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"message about the trainer's memory cannot be read: {error}") from error
        if release != _FORMAT:
            raise ValueError(
                f"message about the trainer's memory has format {release!r}, not {_FORMAT}: releases differ"
            )
        for number, span in enumerate(spans):
            if span.elements == 0:
                continue
            if not 0 <= span.segment < len(segments) or span.offset < 0 or span.elements < 0:
                raise ValueError(
                    f"tensor {number} of the trainer's memory: {span} lies in none of {len(segments)} segments"
                )
            if span.end > segments[span.segment].nbytes:
                raise ValueError(f"tensor {number} of the trainer's memory: {span} leaves {segments[span.segment]}")
        return cls(segments, spans)


class Exporter:
    """A trainer rank's side; keeps the shared file of CPU tensors between refits."""

    def __init__(self) -> None:
        self._file: SharedFile | None = None
        self._device = torch.device(CPU)
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def aim(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """The message from which workers map these tensors, all on one device, where they lie now; values follow with :meth:`show`.

        Equal to the last one while nothing has moved. Tensors stay alive until the next call. Call it once the workers have answered for
        what was shown before. Raises ValueError when the tensors lie on several devices, when one on a GPU is not contiguous or lies in
        memory that CUDA cannot share, and OSError when ``/dev/shm`` has no room or the driver refuses.
        """
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(
                f"tensors lie on {', '.join(sorted(map(str, devices)))}; a trainer rank shows those of one device"
            )
        self._copies = ([], [])
        if not tensors:
            return Export((), ()).encode()
        self._device = devices.pop()
        return (self._lay_out(tensors) if self._device.type == CPU else _locate(tensors, self._device)).encode()

    def show(self) -> None:
        """Makes present values visible: on a GPU it waits until everything queued on the device is done, on a CPU it copies."""
        if self._device.type != CPU:
            torch.cuda.synchronize(self._device)
        else:
            copy_in_host(*self._copies)

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """:meth:`aim` and :meth:`show` in one."""
        message = self.aim(tensors)
        self.show()
        return message

    def close(self) -> None:
        """Gives up the shared file; workers that have mapped it keep the memory until they let go."""
        self._copies = ([], [])
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> Export:
        spans: list[Span] = []
        offset = 0
        for tensor in tensors:
            spans.append(Span(0, offset, tensor.numel(), tensor.dtype))
            offset = -(-spans[-1].end // _ALIGNMENT) * _ALIGNMENT
        if self._file is None or self._file.nbytes < offset:
            self.close()
            self._file = SharedFile(max(offset, 1))
        octets = self._file.octets
        shown = [_view(octets, span).view(tensor.shape) for tensor, span in zip(tensors, spans, strict=True)]
        self._copies = (shown, [tensor.detach() for tensor in tensors])
        return Export((Segment(CPU, self._file.name, self._file.nbytes),), tuple(spans))


class Mapper:
    """A worker rank's side, for the device on which its own tensors lie."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[Segment, torch.Tensor] = {}

    @property
    def segments(self) -> int:
        """How many segments are mapped."""
        return len(self._mapped)

    def map(self, message: bytes) -> tuple[torch.Tensor, ...]:
        """The trainer's tensors, flat, in the order in which it gave them: its memory itself, to be read only. What lies in the host's
        memory is pinned for a GPU.

        Segments that the message no longer names are unmapped once no tensor over them is left, so let go of the tensors of an older
        message, and of tables over them, before. Raises ValueError for a message that cannot be read and for a GPU that this process
        does not see, OSError when memory cannot be mapped, FileNotFoundError when its owner has given it up.
        """
        export = Export.decode(message)
        self._mapped = {segment: self._mapped[segment] for segment in export.segments if segment in self._mapped}
        for segment in export.segments:
            if segment not in self._mapped:
                self._mapped[segment] = self._open(segment)
        return tuple(
            _view(self._mapped[export.segments[span.segment]], span)
            if span.elements
            else torch.empty(0, dtype=span.dtype, device=self._device)
            for span in export.spans
        )

    def close(self) -> None:
        """Lets go of everything, and removes shared files whose trainers are gone."""
        self._mapped = {}
        remove_orphans()

    def _open(self, segment: Segment) -> torch.Tensor:
        if segment.device == CPU:
            return map_file(segment.handle, segment.nbytes, pinned=self._device.type == "cuda")
        visible = [device_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        if segment.device not in visible:
            raise ValueError(
                f"the trainer's tensors lie on {segment.device}, which this process does not see (it sees {', '.join(visible) or 'none'}): "
                "give the pod that GPU, or use another transport than Colocated"
            )
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        try:
            handle = base64.b64decode(segment.handle, validate=True)
        except binascii.Error as error:
            raise ValueError(f"handle {segment.handle!r} of the trainer's memory is not base64") from error
        if len(handle) != cudaipc.HANDLE_BYTES:
            raise ValueError(f"handle of the trainer's memory has {len(handle)} bytes, not {cudaipc.HANDLE_BYTES}")
        mapping = cudaipc.open_segment(handle, segment.nbytes, index)
        return torch.as_tensor(mapping, device=torch.device("cuda", visible.index(segment.device)))


def spans_in(
    places: Sequence[tuple[int, int]], allocation_of: Callable[[int], tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The allocations (address, bytes) that hold memory, and for each place (address, bytes) which of them and from which byte on.

    A place of no bytes is nowhere. ``allocation_of`` is asked once for each allocation. Raises ValueError when a place reaches beyond
    its allocation.
    """
    allocations: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = [(0, 0)] * len(places)
    for number in sorted(range(len(places)), key=places.__getitem__):
        address, nbytes = places[number]
        if nbytes == 0:
            continue
        if not allocations or address >= sum(allocations[-1]):
            allocations.append(allocation_of(address))
        base, size = allocations[-1]
        if address + nbytes > base + size:
            raise ValueError(f"{nbytes} bytes at {address:#x} leave their allocation of {size} bytes at {base:#x}")
        spans[number] = (len(allocations) - 1, address - base)
    return allocations, spans


def _locate(tensors: Sequence[torch.Tensor], device: torch.device) -> Export:
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor {number} of shape {list(tensor.shape)} has strides {list(tensor.stride())}; only contiguous tensors are shown"
            )
    index = torch.cuda.current_device() if device.index is None else device.index
    places = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    allocations, spans = spans_in(places, lambda address: cudaipc.allocation_of(address, index))
    name = device_name(device)
    segments = [
        Segment(name, base64.b64encode(cudaipc.handle_of(base, index)).decode(), size) for base, size in allocations
    ]
    return Export(
        tuple(segments),
        tuple(
            Span(segment, offset, tensor.numel(), tensor.dtype)
            for (segment, offset), tensor in zip(spans, tensors, strict=True)
        ),
    )


def _view(octets: torch.Tensor, span: Span) -> torch.Tensor:
    return octets[span.offset : span.end].view(span.dtype)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor's elements")  # noqa: TRY004 - a word of the message, not of the caller
    return dtype
