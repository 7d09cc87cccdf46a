"""The sending side of a transfer by layout: one trainer rank executes its share of every audience's program.

Three lanes run beside each other: pieces are packed into slabs where they cannot be sent as they lie, messages leave in groups, and the
sums of what is sent are taken. The host waits once, at the end. Without a GPU, where messages leave while the host waits, a second thread
takes their sums meanwhile.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.layout.layout import Layout
from rolloutfleet.layout.program import Message, Part
from rolloutfleet.sources.source import Span, WeightSource
from rolloutfleet.tiles.aliases import alias_of
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet.tiles.digesting import SumTable, sums_digest
from rolloutfleet.tiles.hostwork import copy_in_host
from rolloutfleet.transport.courses import Course, audiences_of, plan_course
from rolloutfleet.transport.greeting import greet
from rolloutfleet.transport.group import Group, ending_on_failure
from rolloutfleet.transport.lanes import Lane, Mark, await_mark, working_on
from rolloutfleet.transport.opening import open_transfer
from rolloutfleet.transport.routes import Route, first_hops
from rolloutfleet.transport.tables import share_sums

RING: Final = 2
"""Slabs: one is packed while another is sent."""

_ALIGNMENT: Final = 256

CopyEntry = tuple[torch.Tensor, Block, torch.Tensor, Block]
SumEntry = tuple[torch.Tensor, Block, int, Block, int]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the trainer sent."""

    tensors: int
    """Source tensors of which at least one worker rank has taken something."""
    nbytes: int
    """Bytes that left all trainer ranks, counted once for each audience."""
    digests: Mapping[str, str]
    """What a rank must hold, by the digest of its layout; on trainer rank 0, empty on the others."""
    seconds: Mapping[str, float]
    """``pack``, ``wire`` and ``digest``, which overlap on a GPU: each from the beginning of its first work to the end of its last."""


@dataclass(slots=True)
class _Step:
    """What is begun together, resolved to memory."""

    copies: CopyTable | None = None
    casts: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    """Views of the slab, and views of source tensors of another type that go there."""
    reads: list[tuple[int, Block, torch.Tensor]] = field(default_factory=list)
    """Source pieces that are scattered or lie on another device, and the part of the slab that takes them."""
    messages: list[tuple[Course, torch.Tensor]] = field(default_factory=list)
    sums: list[tuple[int, SumTable]] = field(default_factory=list)


class Pusher:
    """One trainer rank's side of the transfers of one epoch; made once for a manifest and its layouts, used for every refit.

    ``layouts`` gives the layout of every worker rank, ``holdings`` what each trainer rank holds, by rank; ``route`` overrides the one
    that fits each audience. Making it exchanges a few bytes with the workers' :class:`~rolloutfleet.transport.pulling.Puller`, which
    must be made at the same time. Raises ValueError when the holdings do not cover a layout or a member derives another program, and
    what the group raises at ``deadline`` (a time of ``time.monotonic``).
    """

    def __init__(
        self,
        group: Group,
        manifest: Manifest,
        layouts: Mapping[int, Layout],
        holdings: Sequence[Holdings],
        route: Route | None = None,
        *,
        deadline: float,
    ) -> None:
        self._group = group
        self._manifest = manifest
        self._trainer_ranks = len(holdings)
        audiences = audiences_of({rank: layout.digest for rank, layout in layouts.items()})
        self._courses = tuple(
            plan_course(manifest, layouts[audience.ranks[0]], holdings, audience, len(audiences), route)
            for audience in audiences
        )
        taken = zip(*(course.program.placed for course in self._courses), strict=True)
        self._tensors = sum(1 for elements in taken if any(elements))
        self._pack, self._wire, self._sum = (Lane(group.device) for _ in range(3))
        self._slabs: list[torch.Tensor] = []
        self._steps: list[_Step] = []
        self._addresses: Hashable = None
        with ending_on_failure(group):
            greet(group, self._courses, self._trainer_ranks, deadline)

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the slabs."""
        return sum(slab.numel() for slab in self._slabs)

    def aim(self, source: WeightSource) -> None:
        """Lays out tables and slabs for a bound source's tensors where they lie now, or finds them where they were.

        The tensors must stay in their places until they have been pushed; they are not kept alive. Raises ValueError for a part that the
        source does not hold.
        """
        addresses = source.addresses()
        if not self._steps or addresses != self._addresses:
            self._addresses, self._steps = None, []
            with working_on(self._group.device):
                self._lay_out(source)
            self._addresses = addresses

    def _lay_out(self, source: WeightSource) -> None:
        drafts = [
            _Draft(self._group, source, self._courses, number)
            for number in range(max((len(course.steps) for course in self._courses), default=0))
        ]
        size = max((draft.filled for draft in drafts), default=0)
        if not self._slabs or self._slabs[0].numel() < size:
            self._slabs.clear()
            for _ in range(RING):
                slab = torch.empty(size, dtype=torch.uint8, device=self._group.device)
                # A transfer that fails may leave work behind, and this object dropped before it is done.
                for lane in (self._pack, self._wire, self._sum):
                    lane.uses(slab)
                self._slabs.append(slab)
        sources = len(self._manifest.tensors)
        self._steps = [draft.resolve(self._slabs[number % RING], sources) for number, draft in enumerate(drafts)]

    def push(self, source: WeightSource, deadline: float) -> Pushed:
        """What was sent of the source, once every byte of this rank's share has left and, on rank 0, all sums are added up.

        Weights must be complete, or queued on the device's default CUDA stream. Raises ValueError when the source's tensors do not lie
        where the one aimed at last had them, else TimeoutError, ConnectionAbortedError and ConnectionError as the group does, which end
        the group.
        """
        if self._addresses is None or source.addresses() != self._addresses:
            raise ValueError("nothing is aimed at, or something that lies elsewhere; call aim() with this source first")
        with ending_on_failure(self._group), working_on(self._group.device), torch.no_grad():
            sums = self._send(source, deadline)
        totals = sums.cpu()
        digests = {
            course.layout.digest: sums_digest(course.layout.digest, totals[number])
            for number, course in enumerate(self._courses)
            if self._group.rank == 0
        }
        return Pushed(
            tensors=self._tensors,
            nbytes=sum(course.program.nbytes for course in self._courses),
            digests=digests,
            seconds={
                "pack": self._pack.take_seconds(),
                "wire": self._wire.take_seconds(),
                "digest": self._sum.take_seconds(),
            },
        )

    def _send(self, source: WeightSource, deadline: float) -> torch.Tensor:
        lanes = (self._pack, self._wire, self._sum)
        for lane in lanes:
            lane.follow_caller()
        shape = (len(self._courses), len(self._manifest.tensors), 2)
        with self._sum.current():
            sums = torch.zeros(shape, dtype=torch.int64, device=self._group.device)
        if self._group.rank == 0:
            with self._wire.current():
                open_transfer(self._group, self._courses, deadline)
        free: list[tuple[Mark, ...]] = [()] * RING
        with ThreadPoolExecutor(1, thread_name_prefix="rolloutfleet-sums") as beside:
            for number, step in enumerate(self._steps):
                with self._pack.current():
                    self._pack.follow(*free[number % RING])
                    self._pack_step(step, source)
                packed = self._pack.mark()
                adding = partial(self._add_sums, step, sums, packed)
                added = beside.submit(adding) if self._group.device.type == "cpu" else None
                with self._wire.current():
                    self._wire.follow(packed)
                    self._dispatch(step, deadline)
                sent = self._wire.mark()
                if added is None:
                    adding()
                else:
                    added.result()
                free[number % RING] = (sent, self._sum.mark())
        with self._wire.current():
            self._wire.follow(self._sum.mark())
            share_sums(self._group, self._courses, sums, self._trainer_ranks, deadline)
        await_mark(self._wire.mark(), self._group, deadline)
        return sums

    def _pack_step(self, step: _Step, source: WeightSource) -> None:
        if step.copies is not None:
            step.copies.run()
        places, originals = step.casts
        if places and self._group.device.type == "cpu":
            copy_in_host(places, originals)
        elif places:
            torch._foreach_copy_(places, originals)
        for index, block, place in step.reads:
            place.copy_(source.read(index, block, place.dtype, place.device))

    def _add_sums(self, step: _Step, sums: torch.Tensor, packed: Mark) -> None:
        with self._sum.current():
            self._sum.follow(packed)
            for course, table in step.sums:
                table.run(sums[course])

    def _dispatch(self, step: _Step, deadline: float) -> None:
        group = self._group
        with group.grouped(deadline):
            for course, payload in step.messages:
                if course.route is Route.BROADCAST:
                    group.broadcast(payload, group.rank, deadline)
                    continue
                for rank in first_hops(course.route, course.audience):
                    group.send(payload, rank, deadline)


class _Draft:
    """One step while its slab is not yet known: entries that name the slab by byte offsets."""

    def __init__(self, group: Group, source: WeightSource, courses: Sequence[Course], number: int) -> None:
        self.filled = 0
        self._device = group.device
        self._source = source
        self._copies: list[tuple[Span, int, torch.dtype]] = []
        self._casts: list[tuple[Span, int, torch.dtype]] = []
        self._reads: list[tuple[Part, int, torch.dtype]] = []
        self._messages: list[tuple[Course, torch.Tensor | range]] = []
        self._sums: dict[int, list[Callable[[torch.Tensor], SumEntry]]] = {}
        for index, course in enumerate(courses):
            if number >= len(course.steps):
                continue
            for message in (course.program.messages[at] for at in course.steps[number]):
                if message.sender == group.rank:
                    self._add(index, course, message)

    def _add(self, index: int, course: Course, message: Message) -> None:
        located = [self._locate(part) for part in message.parts]
        spans = [_lasting(found, _dtype(course, part)) for part, found in zip(message.parts, located, strict=True)]
        entries = self._sums.setdefault(index, [])
        straight = _straight(message, spans)
        base = self.filled
        if straight is not None:
            self._messages.append((course, straight))
        else:
            self.filled = -(-(base + message.nbytes) // _ALIGNMENT) * _ALIGNMENT
            self._messages.append((course, range(base, base + message.nbytes)))
        for part, found, lasting in zip(message.parts, located, spans, strict=True):
            dtype = _dtype(course, part)
            unit = course.program.units[part.source]
            if straight is None:
                self._pack(part, base + part.position, dtype, found)
            entries.append(_sum_entry(part, base + part.position, dtype, unit, lasting))

    def _locate(self, part: Part) -> tuple[Span, ...] | None:
        """Where the part lies on the group's device; None where it has to be fetched each time."""
        spans = self._source.spans(part.source, part.source_block)
        if spans is None or any(span.tensor.device != self._device for span in spans):
            return None
        # What is laid out outlives the trainer's interest in its tensors.
        return tuple(Span(alias_of(span.tensor), span.block) for span in spans)

    def _pack(self, part: Part, start: int, dtype: torch.dtype, found: tuple[Span, ...] | None) -> None:
        if found is None:
            self._reads.append((part, start, dtype))
            return
        for span in found:
            (self._copies if span.tensor.dtype == dtype else self._casts).append((span, start, dtype))
            start += span.block.elements * dtype.itemsize

    def resolve(self, slab: torch.Tensor, sources: int) -> _Step:
        """The step with its slab."""
        copies: list[CopyEntry] = []
        for span, start, dtype in self._copies:
            elements = span.block.elements
            place = slab[start : start + elements * dtype.itemsize].view(dtype)
            copies.append((span.tensor, span.block, place, Block.contiguous(0, elements)))
        step = _Step(copies=CopyTable.build(copies) if copies else None)
        for span, start, dtype in self._casts:
            place = slab[start : start + span.block.elements * dtype.itemsize].view(dtype)
            step.casts[0].append(place.view(span.block.rows, span.block.run))
            step.casts[1].append(span.view)
        for part, start, dtype in self._reads:
            elements = part.block.elements
            place = slab[start : start + elements * dtype.itemsize].view(dtype)
            step.reads.append((part.source, part.source_block, place))
        for course, payload in self._messages:
            step.messages.append(
                (course, slab[payload.start : payload.stop] if isinstance(payload, range) else payload)
            )
        for course_number, entries in self._sums.items():
            table = SumTable.build([entry(slab) for entry in entries], sources=sources)
            step.sums.append((course_number, table))
        return step


def _lasting(spans: tuple[Span, ...] | None, dtype: torch.dtype) -> tuple[Span, ...] | None:
    """The spans, where what lies there is sent as it is."""
    return spans if spans is not None and all(span.tensor.dtype == dtype for span in spans) else None


def _straight(message: Message, spans: Sequence[tuple[Span, ...] | None]) -> torch.Tensor | None:
    """The payload as it lies in the source, where it is one run of it; None where it must be packed."""
    found = spans[0]
    if len(spans) != 1 or found is None or len(found) != 1:
        return None
    tensor, block = found[0].tensor, found[0].block
    if block.rows != 1 or block.run * tensor.element_size() != message.nbytes:
        return None
    return tensor.detach()[block.offset : block.offset + block.run].view(torch.uint8)


def _sum_entry(
    part: Part, start: int, dtype: torch.dtype, unit: int, found: tuple[Span, ...] | None
) -> Callable[[torch.Tensor], SumEntry]:
    """The part's line in a sum table: over the trainer's own memory where it lies there in one block whose runs are whole words, else over
    what was packed."""
    if found is not None and len(found) == 1 and found[0].block.run * dtype.itemsize % unit == 0:
        span = found[0]
        return lambda _: (span.tensor, span.block, part.source, part.source_block, unit)
    elements = part.block.elements
    stop = start + elements * dtype.itemsize
    whole = Block.contiguous(0, elements)
    return lambda slab: (slab[start:stop].view(dtype), whole, part.source, part.source_block, unit)


def _dtype(course: Course, part: Part) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, course.layout.parameters[part.parameter].dtype)
    return dtype


__all__ = ["Pushed", "Pusher"]
