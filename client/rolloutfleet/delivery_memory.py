"""The Colocated transport on the trainer's side: a rank shows its tensors in memory that workers map, and sums them up itself."""

import ctypes
import threading
import time
from collections.abc import Hashable

import torch

from rolloutfleet.colocation import Showcase, ShownPiece, await_sums, publish_export, publish_memory, publish_sums
from rolloutfleet.contract.trainer import TrainerPrepare, TrainerSend
from rolloutfleet.delivery import Cargo, Seat, Sent
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.layout import Layout
from rolloutfleet.layout.program import Program, plan_program
from rolloutfleet.sources.source import Span, WeightSource
from rolloutfleet.tiles.aliases import alias_of
from rolloutfleet.tiles.digesting import SumTable, sums_digest
from rolloutfleet.tiles.hostwork import copy_in_host
from rolloutfleet.transport.exchange import await_holdings, await_layouts
from rolloutfleet.transport.memory import Exporter
from rolloutfleet.transport.routes import MESSAGE_BYTES


class SharedDelivery:
    """One rank's part in an epoch without a group."""

    def __init__(self, seat: Seat, epoch: int) -> None:
        self._seat = seat
        self._epoch = epoch
        self._exporter = Exporter()
        self._display: _Display | None = None
        self._addresses: Hashable = None
        """Where what the workers were told of lies; None while they have not been told."""
        self._manifest = ""
        self._shown = ""
        self._version: int | None = None

    def aim(self, cargo: Cargo) -> None:
        """Lays out what is shown, and tells the workers where, if any of it has moved."""
        if self._display is None or cargo.digest != self._manifest:
            return
        addresses, seat = cargo.source.addresses(), self._seat
        if self._addresses is not None and addresses == self._addresses:
            return
        self._addresses = None
        with torch.no_grad():
            self._display.aim(cargo.source)
            message = self._exporter.aim(self._display.tensors)
        self._shown = publish_memory(seat.store, self._epoch, seat.rank, message, self._shown)
        self._addresses = addresses

    def prepare(self, order: TrainerPrepare, cargo: Cargo, cancelled: threading.Event) -> None:
        """Derives what this rank shows, and its share of every layout."""
        seat = self._seat
        deadline = time.monotonic() + order.deadline_seconds
        layouts = await_layouts(seat.store, order.layouts, deadline, cancelled)
        holdings = await_holdings(seat.store, cargo.digest, seat.ranks, deadline, cancelled)
        programs = {
            digest: plan_program(cargo.manifest, layout, holdings, MESSAGE_BYTES) for digest, layout in layouts.items()
        }
        self._display = _Display(Showcase(layouts.values(), holdings[seat.rank]), layouts, programs)
        self._manifest, self._addresses = cargo.digest, None
        self.aim(cargo)

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        """Shows the tensors as they are now; the workers have copied them when the refit is over."""
        display, seat = self._display, self._seat
        if display is None or cargo.digest != self._manifest or self._addresses is None:
            raise ConnectionError(f"told to send in epoch {order.epoch} what this trainer rank has not prepared")
        deadline = time.monotonic() + order.deadline_seconds
        with torch.no_grad():
            display.refresh(cargo.source)
            self._exporter.show()
            publish_export(seat.store, self._epoch, cargo.version, seat.rank, self._shown, self._version)
            self._version = cargo.version
            sums = display.sums(len(cargo.manifest.tensors))
        if seat.rank > 0:
            publish_sums(seat.store, self._epoch, cargo.version, seat.rank, _bytes_of(sums))
            return Sent(len(cargo.manifest.tensors), display.nbytes, {})
        for other in await_sums(seat.store, self._epoch, cargo.version, seat.ranks, deadline):
            sums += torch.frombuffer(bytearray(other), dtype=torch.int64).view(sums.shape)
        digests = {digest: sums_digest(digest, table) for digest, table in zip(display.digests, sums, strict=True)}
        return Sent(len(cargo.manifest.tensors), display.nbytes, digests)

    def end(self, reason: str) -> None:
        """Gives up what was shown; a worker that reads keeps the memory until it lets go."""
        del reason
        self._exporter.close()


class _Display:
    """What a rank shows, resolved to memory: views of the source's tensors, and copies of what is to be cast or gathered first."""

    def __init__(self, showcase: Showcase, layouts: dict[str, Layout], programs: dict[str, Program]) -> None:
        self.digests = tuple(sorted(layouts))
        self._showcase = showcase
        self._layouts = layouts
        self._programs = programs
        self.tensors: list[torch.Tensor] = []
        """What is shown, by piece: valid once :meth:`refresh` has been called."""
        self._casts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._reads: list[int] = []
        self._tables: list[SumTable] = []

    @property
    def nbytes(self) -> int:
        """Bytes that all trainer ranks give, counted once for each layout."""
        return sum(program.nbytes for program in self._programs.values())

    def aim(self, source: WeightSource) -> None:
        """Takes views of a bound source's tensors where they lie now, which do not keep them alive."""
        self.tensors, self._casts, self._reads = [], ([], []), []
        for index, piece in enumerate(self._showcase.pieces):
            self.tensors.append(self._shown(source, index, piece))
        self._tables = [self._table(digest) for digest in self.digests]

    def refresh(self, source: WeightSource) -> None:
        """Makes copies anew where what is shown is a copy."""
        copies, originals = self._casts
        if copies and copies[0].device.type == "cpu":
            copy_in_host(copies, originals)
        elif copies:
            torch._foreach_copy_(copies, originals)
        for index in self._reads:
            piece = self._showcase.pieces[index]
            self.tensors[index].copy_(source.read(piece.source, piece.block))

    def _shown(self, source: WeightSource, index: int, piece: ShownPiece) -> torch.Tensor:
        """The piece as it lies in one run of the source's own memory, or memory for a copy of it."""
        dtype = getattr(torch, piece.dtype)
        spans = source.spans(piece.source, piece.block)
        if spans is None:
            self._reads.append(index)
            return source.read(piece.source, piece.block, dtype).clone()
        if len(spans) == 1 and spans[0].block.rows == 1 and spans[0].tensor.dtype == dtype:
            return alias_of(spans[0].view.view(-1))
        copy = torch.empty(piece.block.elements, dtype=dtype, device=spans[0].tensor.device)
        begin = 0
        for span in spans:
            self._casts[0].append(copy[begin : begin + span.block.elements].view(span.block.rows, span.block.run))
            self._casts[1].append(Span(alias_of(span.tensor), span.block).view)
            begin += span.block.elements
        return copy

    def sums(self, sources: int) -> torch.Tensor:
        """int64 [layouts, sources, 2] in the host's memory: this rank's share of every layout, by layout digest."""
        if not self._tables:
            return torch.zeros((0, sources, 2), dtype=torch.int64)
        return torch.stack([table.run() for table in self._tables]).cpu()

    def _table(self, digest: str) -> SumTable:
        layout, program = self._layouts[digest], self._programs[digest]
        entries: list[tuple[torch.Tensor, Block, int, Block, int]] = []
        for _, message in program.sent_by(self._showcase.rank):
            for part in message.parts:
                dtype = layout.parameters[part.parameter].dtype
                index, pairs = self._showcase.find(part.source, part.source_block, dtype)
                tensor, unit = self.tensors[index], program.units[part.source]
                entries += [(tensor, place, part.source, block, unit) for block, place in pairs]
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        return SumTable.build(entries, sources=len(program.units), device=device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The memory of a contiguous tensor of the host; torch may have been built without numpy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
