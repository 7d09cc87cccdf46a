"""Copies out of the host's memory into a GPU's, made by its copy engines: kernels that decode are not in their way.

A copy engine serves one copy at a time, and an engine that decodes has small ones of its own in every step. So what crosses beside it goes
in short chunks, few of which are queued at once: a small copy waits for a chunk, not for a tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from rolloutfleet.tiles.digesting import CopySumEntry, CopySumTable, SumTable

if TYPE_CHECKING:
    from rolloutfleet.layout.blocks import Block

Entries = Iterable[CopySumEntry | tuple[torch.Tensor, "Block", torch.Tensor, "Block", int, "Block", int]]

CHUNK_BYTES: Final = 1 << 20
"""One copy beside an engine that decodes: some 20 microseconds of a PCIe 5 link."""

STEP_BYTES: Final = 32 << 20
"""Chunks that are queued together: less than a millisecond of that link, so that they are seldom in the way."""


class Step(NamedTuple):
    """A part of a table that is queued in one breath."""

    nbytes: int
    run: Callable[[torch.Tensor], object]
    """Queues it on the current stream; takes the sums (int64 [sources, 2]) to which those of the table are added."""


class CrossingTable:
    """What a :class:`~rolloutfleet.tiles.digesting.CopySumTable` is within one device, for sources in the host's memory.

    Runs of memory that is pinned on both sides of the crossing go as they are; strided blocks are gathered by torch on the way.
    """

    def __init__(
        self, entries: Sequence[CopySumEntry], sources: int, device: torch.device, chunk_bytes: int | None = None
    ) -> None:
        """With ``chunk_bytes`` no copy of a run is larger, and :attr:`steps` are short; without, everything is one step."""
        pairs = [(_view(entry.target, entry.target_block), _view(entry.tensor, entry.block)) for entry in entries]
        self.nbytes = sum(target.nbytes for target, _ in pairs)
        self._sums = SumTable.build(
            [(entry.target, entry.target_block, entry.source, entry.whole_block, entry.unit) for entry in entries],
            sources,
            device,
        )
        if chunk_bytes is not None:
            pairs = [chunk for pair in pairs for chunk in _chunks(*pair, chunk_bytes)]
        groups = _grouped(pairs, STEP_BYTES) if chunk_bytes is not None else [pairs]
        self.steps = (*(_step(group) for group in groups[:-1]), _step(groups[-1], self._sums))
        """In their order; the last one adds the sums of what all targets hold."""

    def run(self, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Queues all steps on the current stream; as :meth:`CopySumTable.run`."""
        if sums is None:
            sums = torch.zeros((self._sums.sources, 2), dtype=torch.int64, device=self._sums.device)
        for step in self.steps:
            step.run(sums)
        return sums


def copy_sum_table(
    entries: Entries, sources: int, device: torch.device, *, beside: bool = False
) -> CopySumTable | CrossingTable:
    """The table for these entries, wherever their sources lie: all on ``device``, or all in the host's memory.

    With ``beside`` it goes in short steps where it crosses, for an engine that decodes meanwhile. Raises what :meth:`CopySumTable.build`
    raises.
    """
    listed = [CopySumEntry(*entry) for entry in entries]
    if all(entry.tensor.device == device for entry in listed):
        return CopySumTable.build(listed, sources, device)
    return CrossingTable(listed, sources, device, CHUNK_BYTES if beside else None)


def steps_of(table: CopySumTable | CrossingTable) -> tuple[Step, ...]:
    """The parts in which a table may be run, with pauses between them."""
    return table.steps if isinstance(table, CrossingTable) else (Step(table.nbytes, table.run),)


Pair = tuple[torch.Tensor, torch.Tensor]
"""A target, and the source of as many elements."""


def _step(pairs: Sequence[Pair], then: SumTable | None = None) -> Step:
    shaped = [(target, _shaped(source, target.shape)) for target, source in pairs]
    plain = [(target, source) for target, source in shaped if source is not None]
    targets, sources = [target for target, _ in plain], [source for _, source in plain]
    scattered = [pair for pair, (_, source) in zip(pairs, shaped, strict=True) if source is None]

    def run(sums: torch.Tensor) -> None:
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in scattered:
            target.copy_(source.reshape(target.shape), non_blocking=True)
        if then is not None:
            then.run(sums)

    return Step(sum(target.nbytes for target, _ in pairs), run)


def _shaped(source: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """The source as a view of this shape; None where there is no such view, and its elements must be gathered each time."""
    return source.view(shape) if source.shape == shape or source.is_contiguous() else None


def _chunks(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[Pair]:
    if target.is_contiguous() and source.is_contiguous():
        size = max(nbytes // target.element_size(), 1)
        yield from zip(target.view(-1).split(size), source.view(-1).split(size), strict=True)
    else:
        yield target, source


def _grouped(pairs: Sequence[Pair], nbytes: int) -> list[list[Pair]]:
    """Neighbours, so many that they have ``nbytes`` together, or one that alone has more; at least one group."""
    groups: list[list[Pair]] = [[]]
    filled = 0
    for pair in pairs:
        if groups[-1] and filled + pair[0].nbytes > nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(pair)
        filled += pair[0].nbytes
    return groups


def _view(tensor: torch.Tensor, block: "Block") -> torch.Tensor:
    flat = tensor.detach().view(-1)
    shape, strides = ((block.rows, block.run), (block.stride, 1)) if block.rows > 1 else ((block.run,), (1,))
    return flat.as_strided(shape, strides, flat.storage_offset() + block.offset)
