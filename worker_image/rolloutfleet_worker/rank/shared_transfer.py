"""Transfers by layout out of the trainer's own memory, which this rank maps: no group, no bucket, one copy."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from rolloutfleet.colocation import Showcase, await_exports
from rolloutfleet.layout import Block, Message, Part, overlap, pair, plan_program, select
from rolloutfleet.tiles.crossing import CrossingTable, copy_sum_table, steps_of
from rolloutfleet.tiles.digesting import CopySumTable, sums_digest
from rolloutfleet.transport.exchange import await_layouts
from rolloutfleet.transport.lanes import Mark
from rolloutfleet.transport.memory import Mapper
from rolloutfleet.transport.pacing import PIECE_BYTES, Pace, serving_rate
from rolloutfleet.transport.routes import MESSAGE_BYTES
from rolloutfleet_worker.rank.transfer import Arrived, Order, Plan, Take, Transfer

LOADED_TOGETHER_BYTES: Final = 256 << 20
"""Source tensors that take the detour are copied out and loaded so many at a time."""

Entry = tuple[torch.Tensor, Block, torch.Tensor, Block, int, Block, int]


class SharedTransfer(Transfer):
    """Raises what reading the store raises; nothing is mapped before the trainer shows its tensors."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        holdings = plan.agree()
        layouts = await_layouts(plan.member.store, plan.layouts, plan.deadline, plan.cancelled)
        self._showcases = [Showcase(layouts.values(), held) for held in holdings]
        self._program = plan_program(plan.known.manifest, self.layout, holdings, MESSAGE_BYTES)
        self._mappers = [Mapper(_device_of(plan)) for _ in holdings]
        self._device = _device_of(plan)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._shown: tuple[bytes, ...] = ()
        self._pieces: list[tuple[torch.Tensor, ...]] = []
        self._tables: list[CopySumTable | CrossingTable] = []

    def close(self) -> None:
        """Unmaps the trainer's memory; the next transfer maps it anew."""
        self._tables, self._pieces, self._shown = [], [], ()
        for mapper in self._mappers:
            mapper.close()

    def _pull(self, destinations: dict[str, torch.Tensor], order: Order, take: Take) -> Arrived:
        member = self._plan.member
        shown = await_exports(
            member.store,
            member.epoch,
            order.version,
            member.trainer_ranks,
            order.deadline,
            order.cancelled,
            known=self._shown,
        )
        moved = self._moved(destinations)
        with self._on_stream():
            if shown != self._shown:
                self._map(shown)
            if moved or not self._tables:
                self._tables = self._tables_of(destinations)
                self._aimed(destinations)
            sums = torch.zeros((len(self.known.manifest.tensors), 2), dtype=torch.int64, device=self._device)
            self.landed = True
            self._run(sums, order)
            for parameters in self._detoured():
                self._load(parameters, sums, take)
            held = sums.cpu()
        return Arrived(self._program.nbytes, sums_digest(self.layout.digest, held))

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A stream of its own, so that an engine that serves is not made to wait; what was queued on it is done at the end."""
        if self._stream is None:
            with torch.no_grad():
                yield
            return
        with torch.no_grad(), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def _map(self, shown: tuple[bytes, ...]) -> None:
        # Mappings go only when no tensor is left over them.
        self._tables, self._pieces = [], []
        self._pieces = [mapper.map(message) for mapper, message in zip(self._mappers, shown, strict=True)]
        self._shown = shown

    def _tables_of(self, destinations: dict[str, torch.Tensor]) -> list[CopySumTable | CrossingTable]:
        """One table for an engine that waits; one for each piece beside an engine that serves, whose kernels go between."""
        live = {
            index: destinations[parameter.name]
            for index, parameter in enumerate(self.layout.parameters)
            if not parameter.temporary
        }
        pieces: list[list[Entry]] = [[]]
        filled = 0
        for entry in self._entries_into(live):
            nbytes = entry[1].elements * entry[0].element_size()
            if self.staged and pieces[-1] and filled + nbytes > PIECE_BYTES:
                pieces.append([])
                filled = 0
            pieces[-1].append(entry)
            filled += nbytes
        sources = len(self.known.manifest.tensors)
        return [copy_sum_table(piece, sources, self._device, beside=self.staged) for piece in pieces]

    def _run(self, sums: torch.Tensor, order: Order) -> None:
        """Queues every copy, at the pace that leaves an engine that serves its own; raises what ends the waiting for it."""
        crossing = any(isinstance(table, CrossingTable) for table in self._tables)
        pace = Pace(serving_rate(self._device, from_host=crossing) if self.staged else None)
        before, moved = None, 0
        for step in (step for table in self._tables for step in steps_of(table)):
            pace.await_turn(before, moved, lambda: _raise_if_over(order))
            step.run(sums)
            before, moved = self._mark(), step.nbytes

    def _mark(self) -> Mark:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _load(self, parameters: Sequence[int], sums: torch.Tensor, take: Take) -> None:
        """Copies these source tensors out whole, since the loader may keep them, and hands them over."""
        specs = {spec.name: spec for spec in self.known.manifest.tensors}
        targets: dict[int, torch.Tensor] = {}
        for index in parameters:
            parameter = self.layout.parameters[index]
            dtype = getattr(torch, parameter.dtype)
            targets[index] = torch.empty(parameter.elements, dtype=dtype, device=self._device)
        entries = list(self._entries_into(targets))
        copy_sum_table(entries, len(specs), self._device).run(sums)
        names = [self.layout.parameters[index].name for index in parameters]
        take([(name, targets[index].view(specs[name].shape)) for name, index in zip(names, parameters, strict=True)])

    def _detoured(self) -> Iterator[list[int]]:
        """The layout's temporaries, some at a time."""
        group: list[int] = []
        filled = 0
        for index, parameter in enumerate(self.layout.parameters):
            if not parameter.temporary:
                continue
            if group and filled + parameter.nbytes > LOADED_TOGETHER_BYTES:
                yield group
                group, filled = [], 0
            group.append(index)
            filled += parameter.nbytes
        if group:
            yield group

    def _entries_into(self, targets: dict[int, torch.Tensor]) -> Iterator[Entry]:
        """Everything that goes to these parameters."""
        for message in self._program.messages:
            for part in message.parts:
                if part.parameter in targets:
                    yield from self._entries(message, part, targets[part.parameter])

    def _entries(self, message: Message, part: Part, target: torch.Tensor) -> Iterator[Entry]:
        dtype = self.layout.parameters[part.parameter].dtype
        index, found = self._showcases[message.sender].find(part.source, part.source_block, dtype)
        piece, unit = self._pieces[message.sender][index], self._program.units[part.source]
        for whole, place in found:
            positions = [position for _, position in overlap(part.source_block, whole)]
            into = [block for position in positions for block in select(part.block, position)]
            for from_block, to_block, whole_block in _aligned([place], into, [whole]):
                yield piece, from_block, target, to_block, part.source, whole_block, unit


def _aligned(
    places: Sequence[Block], targets: Sequence[Block], wholes: Sequence[Block]
) -> Iterator[tuple[Block, Block, Block]]:
    """Three sequences of blocks with equally many elements, cut so that the n-th blocks correspond element by element."""
    while not len(places) == len(targets) == len(wholes):
        places, targets = zip(*pair(places, targets), strict=True)
        wholes, targets = zip(*pair(wholes, targets), strict=True)
    return zip(places, targets, wholes, strict=True)


def _raise_if_over(order: Order) -> None:
    if order.cancelled.is_set():
        raise ConnectionAbortedError(f"receiving version {order.version} was cancelled")
    if time.monotonic() >= order.deadline:
        raise TimeoutError(f"version {order.version} was not copied out of the trainer's memory in time")


def _device_of(plan: Plan) -> torch.device:
    return next(parameter.device for parameter in plan.model.parameters() if not parameter.is_meta)
