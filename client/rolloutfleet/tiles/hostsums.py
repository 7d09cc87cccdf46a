"""Sums of words in the host's memory, without a thread more than is asked for.

torch's operators start threads of their own, as many as the machine has cores, for tensors from :data:`_SERIAL` elements on. Here none is
that large: how many cores are taken is decided by :mod:`rolloutfleet.tiles.hostwork` alone, and what is worked on stays in their caches.
"""

from collections.abc import Sequence
from typing import Final

import torch

from rolloutfleet.tiles.hostwork import share_out

_WIDTH: Final = 512
"""Words of a row: memory that is one run is summed as a matrix of so many columns."""

_SERIAL: Final = 1 << 15

_BLOCK: Final = _SERIAL // _WIDTH * _WIDTH - _WIDTH
"""Words that are widened at once, below :data:`_SERIAL`."""

_PIECE: Final = 1 << 20
"""Words of a run that one thread takes at a time."""


def sums_of_run(words: torch.Tensor) -> torch.Tensor:
    """Both sums (int64 [2]) of a whole tensor that is given as signed words in one dimension, without gaps."""
    pieces = list(enumerate(words.split(_PIECE)))
    parts = torch.zeros((len(pieces), 2), dtype=torch.int64)

    def add(some: Sequence[tuple[int, torch.Tensor]]) -> None:
        adder = HostSums()
        for number, piece in some:
            adder.add(piece.view(1, -1), number * _PIECE, 0, parts[number])

    share_out(pieces, add)
    return parts.sum(0)


class HostSums:
    """The buffers of one thread; a weight by a word's place costs no product for each word, since rows and columns are summed first.

    With ``w[r, c]`` at index ``first + r * step + c``, ``sum(w * (index + 1))`` is the sum of the columns' sums times ``c + 1``, and of the
    rows' sums times ``first + r * step``.
    """

    def __init__(self) -> None:
        self._wide = torch.empty(_BLOCK, dtype=torch.int64)
        self._rows = torch.empty(_BLOCK, dtype=torch.int64)
        self._columns = torch.empty(_BLOCK, dtype=torch.int64)
        self._more = torch.empty(_BLOCK, dtype=torch.int64)
        self._ramp = torch.arange(_BLOCK + 1, dtype=torch.int64)

    def add(self, words: torch.Tensor, first: int, step: int, sums: torch.Tensor) -> None:
        """Adds both sums of a matrix of signed words to ``sums`` (int64 [2]); it may have gaps between its rows.

        Word ``[r, c]`` has index ``first + r * step + c`` in its whole tensor.
        """
        rows, run = words.shape
        if rows > 1 and run <= _BLOCK:
            self._add(words, first, step, sums)
            return
        for number, row in enumerate(words.unbind(0)):
            at = first + number * step
            full = run // _WIDTH * _WIDTH
            if full:
                self._add(row[:full].view(-1, _WIDTH), at, _WIDTH, sums)
            if full < run:
                self._add(row[full:].view(1, -1), at + full, 0, sums)

    def _add(self, words: torch.Tensor, first: int, step: int, sums: torch.Tensor) -> None:
        run = words.shape[1]
        together = _BLOCK // run
        wide = self._wide[: together * run].view(together, run)
        columns, more = self._columns[:run], self._more[:run]
        for group in words.split(_BLOCK):
            rows = self._rows[: group.shape[0]]
            columns.zero_()
            for block, totals in zip(group.split(together), rows.split(together), strict=True):
                place = wide if block.shape[0] == together else wide[: block.shape[0]]
                place.copy_(block)
                torch.sum(place, 1, out=totals)
                torch.sum(place, 0, out=more)
                columns.add_(more)
            plain = rows.sum()
            sums[0] += plain
            sums[1] += plain * first + (rows * self._ramp[: rows.numel()]).sum() * step
            sums[1] += (columns * self._ramp[1 : run + 1]).sum()
            first += rows.numel() * step
