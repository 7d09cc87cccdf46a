"""The receiving side of a transfer by layout: one worker rank takes its audience's messages, and proves what it holds.

Messages that are one run of one parameter are received in place; others arrive in a slab and are scattered. Sums are taken of the
memory that the model will compute with, after the bytes are there. Lanes run beside each other and the host waits once, at the end.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.layout.layout import Layout
from rolloutfleet.layout.program import Message, Part
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet.tiles.digesting import SumTable, sums_digest
from rolloutfleet.transport.courses import audiences_of, plan_course
from rolloutfleet.transport.greeting import greet
from rolloutfleet.transport.group import Group, ending_on_failure
from rolloutfleet.transport.lanes import Lane, Mark, await_mark, raise_if_over, working_on
from rolloutfleet.transport.opening import receive_opening
from rolloutfleet.transport.pacing import Pace
from rolloutfleet.transport.routes import Route, place_of
from rolloutfleet.transport.tables import check_sums, receive_sums

RING: Final = 3
"""Slabs: one is filled while the one before it is forwarded and scattered, and the one before that may still be."""

_ALIGNMENT: Final = 256

TakeTemporaries = Callable[[Sequence[tuple[str, torch.Tensor]]], None]
"""Takes whole source tensors, with their names, on the current CUDA stream; it may keep them."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What arrived: equal to what was sent, or :meth:`Puller.pull` would have raised."""

    tensors: int
    """Source tensors of which this rank has taken something."""
    nbytes: int
    """Bytes that this rank received."""
    digest: str
    """Digest of what this rank holds of its layout: equal on every rank of the audience."""
    sums: torch.Tensor
    """int64 (sources, 2) on the CPU: the digest's raw material, of what the parameters and temporaries held."""
    units: tuple[int, ...]
    """By source: bytes of the words behind the sums."""
    seconds: Mapping[str, float]
    """``wire``, ``scatter``, ``digest`` and ``load`` (the temporaries), which overlap on a GPU: each from the beginning of its first
    work to the end of its last."""


@dataclass(slots=True)
class _Step:
    """What is received together, resolved to memory as far as that lasts."""

    messages: list[tuple[Message, torch.Tensor | None]] = field(default_factory=list)
    """With the memory that takes it; None for one that is received in place into a temporary."""
    scatter: CopyTable | None = None
    sums: SumTable | None = None
    temporary: list[tuple[Part, torch.Tensor | None]] = field(default_factory=list)
    """Parts of temporaries, with their bytes in the slab; None where they are received in place."""
    complete: list[tuple[int, int]] = field(default_factory=list)
    """Temporaries that are whole after this step: parameter and source."""
    nbytes: int = 0


class Puller:
    """One worker rank's side of the transfers of one epoch; made once for a manifest and its layout, used for every refit.

    ``layouts`` are the layout digests of all worker ranks in rank order, as the sync job gives them; ``holdings`` what each trainer
    rank holds. ``destinations`` are flat contiguous tensors by parameter name, live or staged, for every parameter of the layout that
    is not temporary. No more than ``bytes_per_second`` arrive, or with None as many as come: on some wires a bound slows down all members,
    since they wait for each other. Making it exchanges a few bytes with the trainer's
    :class:`~rolloutfleet.transport.pushing.Pusher`. Raises ValueError when the layout is not this rank's, a destination does not fit its
    parameter or a member derives another program, and what the group raises at ``deadline`` (a time of ``time.monotonic``).
    """

    def __init__(
        self,
        group: Group,
        manifest: Manifest,
        layout: Layout,
        holdings: Sequence[Holdings],
        layouts: Sequence[str],
        destinations: Mapping[str, torch.Tensor],
        route: Route | None = None,
        *,
        bytes_per_second: float | None = None,
        deadline: float,
    ) -> None:
        trainer_ranks = len(holdings)
        audiences = audiences_of(dict(enumerate(layouts, trainer_ranks)))
        audience = next((audience for audience in audiences if group.rank in audience.ranks), None)
        if audience is None or audience.layout != layout.digest:
            raise ValueError(
                f"rank {group.rank} has the layout {layout.digest}, but was told to prepare with "
                f"{audience.layout if audience else 'none: it is not a worker rank'}"
            )
        self._group = group
        self._manifest = manifest
        self._layout = layout
        self._course = plan_course(manifest, layout, holdings, audience, len(audiences), route)
        self._completed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for done in self._course.program.completions:
            self._completed[done.message].append((done.parameter, done.source))
        self._place = place_of(self._course.route, audience, group.rank)
        self._wire, self._scatter, self._sum, self._load = (Lane(group.device) for _ in range(4))
        self._slabs: list[torch.Tensor] = []
        self._steps: list[_Step] = []
        self._addresses: tuple[int | None, ...] = ()
        self._bytes_per_second = bytes_per_second
        self._landed = False
        self.aim(destinations)
        with ending_on_failure(group):
            greet(group, (self._course,), trainer_ranks, deadline)

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the slabs."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def landed(self) -> bool:
        """Whether any byte of the last transfer may have reached a destination; False when it failed before the trainer's first word."""
        return self._landed

    def aim(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """Directs the next transfers into these tensors, or finds that they are; ValueError naming one that does not fit its parameter."""
        targets = self._checked(destinations)
        addresses = tuple(None if target is None else target.data_ptr() for target in targets)
        if self._steps and addresses == self._addresses:
            return
        size = max((self._slab_bytes(step) for step in self._course.steps), default=0)
        if not self._slabs:
            self._slabs = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(RING)]
        # A transfer that fails may leave work behind, and whoever has this memory may let go of it before that is done.
        for tensor in (*self._slabs, *(target for target in targets if target is not None)):
            for lane in (self._wire, self._scatter, self._sum):
                lane.uses(tensor)
        with working_on(self._group.device):
            self._steps = [
                self._resolve(step, targets, self._slabs[number % RING])
                for number, step in enumerate(self._course.steps)
            ]
        self._addresses = addresses

    def pull(self, deadline: float, take_temporaries: TakeTemporaries) -> Pulled:
        """What arrived, once it lies in the destinations, equals what the trainer sent, and all temporaries are handed over and used.

        Destinations must not be in use by other CUDA streams. Raises DigestMismatch naming source tensors, after which the group is
        whole; else TimeoutError, ConnectionAbortedError, ConnectionError or what ``take_temporaries`` raises, which end the group and
        leave the destinations half written if anything has :attr:`landed`.
        """
        self._landed = False
        with ending_on_failure(self._group), working_on(self._group.device), torch.no_grad():
            held, expected = self._receive(deadline, take_temporaries)
        sums = held.cpu()
        check_sums(self._manifest, expected.cpu(), sums)
        return Pulled(
            tensors=sum(1 for elements in self._course.program.placed if elements),
            nbytes=self._course.program.nbytes,
            digest=sums_digest(self._layout.digest, sums),
            sums=sums,
            units=self._course.program.units,
            seconds={
                "wire": self._wire.take_seconds(),
                "scatter": self._scatter.take_seconds(),
                "digest": self._sum.take_seconds(),
                "load": self._load.take_seconds(),
            },
        )

    def _receive(self, deadline: float, take: TakeTemporaries) -> tuple[torch.Tensor, torch.Tensor]:
        group, sources = self._group, len(self._manifest.tensors)
        for lane in (self._wire, self._scatter, self._sum, self._load):
            lane.follow_caller()
        temporaries = _Temporaries(self._layout, self._manifest, group.device, (self._scatter, self._sum, self._load))
        with self._sum.current():
            sums = torch.zeros((sources, 2), dtype=torch.int64, device=group.device)
        # Once receives are queued, an abort lets what is queued behind them run; so nothing is before there is something to receive.
        with self._wire.current():
            receive_opening(group, self._course, deadline)
        await_mark(self._wire.mark(), group, deadline)
        self._landed = True
        self._hand_over(self._completed[-1], temporaries, None, take)
        pace, moved, arrived = Pace(self._bytes_per_second), 0, None
        free: list[Mark] = [None] * RING
        forward: list[torch.Tensor] = []
        handing: tuple[list[tuple[int, int]], Mark] = ([], None)
        for number, step in enumerate(self._steps):
            pace.await_turn(arrived, moved, lambda: raise_if_over(group, deadline))
            with self._wire.current():
                self._wire.follow(free[number % RING])
                forward = self._exchange(step, temporaries, forward, deadline)
            arrived, moved = self._wire.mark(), step.nbytes
            # Making a table waits for the stream that it is made on, which must not be one that waits for the wire.
            scatter, add_sums = temporaries.tables(step.temporary, self._course.program.units)
            with self._scatter.current():
                self._scatter.follow(arrived)
                if step.scatter is not None:
                    step.scatter.run()
                if scatter is not None:
                    scatter.run()
            scattered = free[number % RING] = self._scatter.mark()
            with self._sum.current():
                self._sum.follow(scattered)
                if step.sums is not None:
                    step.sums.run(sums)
                if add_sums is not None:
                    add_sums.run(sums)
            # The next step is on its way while the loader works on this one's tensors.
            self._hand_over(handing[0], temporaries, handing[1], take)
            handing = (step.complete, scattered)
        with self._wire.current():
            if forward:
                self._forward(forward, deadline)
            expected = receive_sums(group, self._course, sources, deadline)
        self._hand_over(handing[0], temporaries, handing[1], take)
        for lane in (self._wire, self._scatter, self._sum, self._load):
            await_mark(lane.mark(), group, deadline)
        return sums, expected

    def _exchange(
        self, step: _Step, temporaries: "_Temporaries", forward: list[torch.Tensor], deadline: float
    ) -> list[torch.Tensor]:
        """Receives a step while the one before it is forwarded; what has to be forwarded next."""
        group, route, before = self._group, self._course.route, self._place.before
        payloads = [
            (message, temporaries.payload(message) if place is None else place) for message, place in step.messages
        ]
        for part, place in step.temporary:
            if place is not None:
                temporaries.allocate(part.parameter)
        with group.grouped(deadline):
            for message, payload in payloads:
                if route is Route.BROADCAST:
                    group.broadcast(payload, message.sender, deadline)
                else:
                    group.receive(payload, message.sender if before is None else before, deadline)
            self._forward_each(forward, deadline)
        return [payload for _, payload in payloads] if self._place.after is not None else []

    def _forward(self, payloads: Sequence[torch.Tensor], deadline: float) -> None:
        with self._group.grouped(deadline):
            self._forward_each(payloads, deadline)

    def _forward_each(self, payloads: Sequence[torch.Tensor], deadline: float) -> None:
        if self._place.after is not None:
            for payload in payloads:
                self._group.send(payload, self._place.after, deadline)

    def _hand_over(
        self, complete: Sequence[tuple[int, int]], temporaries: "_Temporaries", arrived: Mark, take: TakeTemporaries
    ) -> None:
        if complete:
            with self._load.current():
                self._load.follow(arrived)
                take([temporaries.release(parameter, source) for parameter, source in complete])

    def _checked(self, destinations: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        targets: list[torch.Tensor | None] = []
        for parameter in self._layout.parameters:
            if parameter.temporary:
                targets.append(None)
                continue
            target = destinations.get(parameter.name)
            if target is None:
                raise ValueError(f"no destination for parameter {parameter.name}")
            found = f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)} on {target.device}"
            wanted = f"{parameter.dtype} [{parameter.elements}] on {self._group.device}"
            if found != wanted or not target.is_contiguous():
                raise ValueError(f"destination of {parameter.name} is {found}; it must be a contiguous {wanted}")
            targets.append(target.detach())
        return targets

    def _slab_bytes(self, step: range) -> int:
        messages = (self._course.program.messages[index] for index in step)
        return sum(_aligned(message.nbytes) for message in messages if not message.direct)

    def _resolve(self, indices: range, targets: Sequence[torch.Tensor | None], slab: torch.Tensor) -> _Step:
        step = _Step()
        copies: list[tuple[torch.Tensor, Block, torch.Tensor, Block]] = []
        sums: list[tuple[torch.Tensor, Block, int, Block, int]] = []
        filled = 0
        for message in (self._course.program.messages[index] for index in indices):
            step.nbytes += message.nbytes
            bucket = None if message.direct else slab[filled : filled + message.nbytes]
            filled += 0 if message.direct else _aligned(message.nbytes)
            target = targets[message.parts[0].parameter]
            place = _in_place(target, message) if message.direct and target is not None else bucket
            step.messages.append((message, place))
            for part in message.parts:
                target = targets[part.parameter]
                arriving = None if bucket is None else self._in_bucket(bucket, part)
                if target is None:
                    step.temporary.append((part, arriving))
                    continue
                if arriving is not None:
                    copies.append((arriving, Block.contiguous(0, part.block.elements), target, part.block))
                unit = self._course.program.units[part.source]
                sums.append((target, part.block, part.source, part.source_block, unit))
        if copies:
            step.scatter = CopyTable.build(copies)
        if sums:
            step.sums = SumTable.build(sums, sources=len(self._manifest.tensors))
        step.complete = [done for index in indices for done in self._completed[index]]
        return step

    def _in_bucket(self, bucket: torch.Tensor, part: Part) -> torch.Tensor:
        parameter = self._layout.parameters[part.parameter]
        nbytes = part.block.elements * parameter.itemsize
        return bucket[part.position : part.position + nbytes].view(getattr(torch, parameter.dtype))


class _Temporaries:
    """Source tensors of one transfer that go through vLLM's loader: allocated when their first bytes come, released when whole."""

    def __init__(self, layout: Layout, manifest: Manifest, device: torch.device, lanes: Sequence[Lane]) -> None:
        self._layout = layout
        self._manifest = manifest
        self._device = device
        self._lanes = lanes
        self._held: dict[int, torch.Tensor] = {}

    def allocate(self, parameter: int) -> torch.Tensor:
        """The flat memory of a temporary, allocated on the current stream the first time."""
        tensor = self._held.get(parameter)
        if tensor is None:
            wanted = self._layout.parameters[parameter]
            tensor = torch.empty(wanted.elements, dtype=getattr(torch, wanted.dtype), device=self._device)
            # It is freed by whoever takes it, at a time that says nothing of these lanes.
            for lane in self._lanes:
                lane.uses(tensor)
            self._held[parameter] = tensor
        return tensor

    def payload(self, message: Message) -> torch.Tensor:
        return _in_place(self.allocate(message.parts[0].parameter), message)

    def tables(
        self, parts: Sequence[tuple[Part, torch.Tensor | None]], units: Sequence[int]
    ) -> tuple[CopyTable | None, SumTable | None]:
        """What scatters the parts that lie in slabs, and what adds up all of them."""
        copies = [
            (place, Block.contiguous(0, part.block.elements), self._held[part.parameter], part.block)
            for part, place in parts
            if place is not None
        ]
        sums = [
            (self._held[part.parameter], part.block, part.source, part.source_block, units[part.source])
            for part, _ in parts
        ]
        return (
            CopyTable.build(copies) if copies else None,
            SumTable.build(sums, sources=len(self._manifest.tensors)) if sums else None,
        )

    def release(self, parameter: int, source: int) -> tuple[str, torch.Tensor]:
        """The whole tensor in its own shape, under its name; it is forgotten here."""
        spec = self._manifest.tensors[source]
        tensor = self.allocate(parameter)
        del self._held[parameter]
        return spec.name, tensor.view(spec.shape)


def _in_place(target: torch.Tensor, message: Message) -> torch.Tensor:
    """The run of a parameter that takes a direct message, as bytes."""
    _, run = message.run
    return target[run.offset : run.end].view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


__all__ = ["Pulled", "Puller", "TakeTemporaries"]
