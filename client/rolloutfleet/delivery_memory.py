"""The Colocated transport on the trainer's side: a rank shows its tensors in memory that workers map, and sums them up itself."""

import threading
import time
from collections.abc import Hashable, Sequence

import torch

from rolloutfleet.colocation import Showcase, ShownPiece, await_sums, publish_export, publish_sums
from rolloutfleet.contract.trainer import TrainerPrepare, TrainerSend
from rolloutfleet.delivery import Cargo, Seat, Sent
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.layout import Layout
from rolloutfleet.layout.program import Program, plan_program
from rolloutfleet.sources.source import WeightSource
from rolloutfleet.tiles.digesting import SumTable, sums_digest
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
        self._display.aim(cargo.source)

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        """Shows the tensors as they are now; the workers have copied them when the refit is over."""
        display, seat = self._display, self._seat
        if display is None:
            raise ConnectionError(f"told to send in epoch {order.epoch}, which this trainer rank has not prepared")
        deadline = time.monotonic() + order.deadline_seconds
        cargo.source.bind(cargo.manifest)
        display.aim(cargo.source)
        with torch.no_grad():
            message = self._exporter.export(display.refresh(cargo.source))
            publish_export(seat.store, self._epoch, cargo.version, seat.rank, message)
            sums = display.sums(len(cargo.manifest.tensors))
        if seat.rank > 0:
            publish_sums(seat.store, self._epoch, cargo.version, seat.rank, sums.numpy().tobytes())
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
        self._tensors: list[torch.Tensor] = []
        self._copied: list[int] = []
        self._tables: list[SumTable] = []
        self._aim: Hashable = None

    @property
    def nbytes(self) -> int:
        """Bytes that all trainer ranks give, counted once for each layout."""
        return sum(program.nbytes for program in self._programs.values())

    def aim(self, source: WeightSource) -> None:
        """Takes views of a bound source's tensors where they lie now; does nothing while they lie where they did."""
        addresses = source.addresses()
        if self._tables and addresses == self._aim:
            return
        self._aim = None
        self._tensors, self._copied = [], []
        for index, piece in enumerate(self._showcase.pieces):
            view = _view(source, piece)
            if view is None:
                view = source.read(piece.source, piece.block, getattr(torch, piece.dtype)).clone()
                self._copied.append(index)
            self._tensors.append(view)
        self._tables = [self._table(digest) for digest in self.digests]
        self._aim = addresses

    def refresh(self, source: WeightSource) -> Sequence[torch.Tensor]:
        """The tensors to show, with copies made anew."""
        for index in self._copied:
            piece = self._showcase.pieces[index]
            self._tensors[index].copy_(source.read(piece.source, piece.block))
        return self._tensors

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
                tensor, unit = self._tensors[index], program.units[part.source]
                entries += [(tensor, place, part.source, block, unit) for block, place in pairs]
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        return SumTable.build(entries, sources=len(program.units), device=device)


def _view(source: WeightSource, piece: ShownPiece) -> torch.Tensor | None:
    """The piece as it lies in one run of the source's own memory; None where it does not."""
    spans = source.spans(piece.source, piece.block)
    if spans is None or len(spans) != 1 or spans[0].block.rows != 1:
        return None
    tensor, block = spans[0].tensor, spans[0].block
    if tensor.dtype != getattr(torch, piece.dtype):
        return None
    return tensor[block.offset : block.offset + block.run]
