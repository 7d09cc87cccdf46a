"""Who holds what: the pieces of all trainer ranks, cut so that each block has one set of owners."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet.layout.blocks import Block, first_overlap, overlap, pair, select, subtract
from rolloutfleet.layout.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Owned:
    """A block of a source tensor and every trainer rank that has all of it within one piece."""

    block: Block
    ranks: tuple[int, ...]


def owned_blocks(holdings: Sequence[Holdings]) -> dict[int, tuple[Owned, ...]]:
    """By source: blocks that together are all that is held, do not overlap, and are ordered by offset."""
    held: dict[int, dict[Block, set[int]]] = {}
    for each in holdings:
        for piece in each.pieces:
            held.setdefault(piece.source, {}).setdefault(piece.block, set()).add(each.rank)
    return {source: _apart(blocks) for source, blocks in held.items()}


def shares_of(source_block: Block, block: Block, owned: Sequence[Owned]) -> list[tuple[Block, Block, tuple[int, ...]]]:
    """A placement cut by owners: blocks of the source, the corresponding blocks of the parameter, and the ranks that can send them.

    What nobody holds is missing.
    """
    shares: list[tuple[Block, Block, tuple[int, ...]]] = []
    for each in owned:
        for shared, positions in overlap(source_block, each.block):
            if shared == source_block:
                return [(source_block, block, each.ranks)]
            shares += [(*both, each.ranks) for both in pair((shared,), select(block, positions))]
    return shares


def _apart(held: dict[Block, set[int]]) -> tuple[Owned, ...]:
    blocks = sorted(held, key=_order)
    if first_overlap(blocks) is None:
        return tuple(Owned(block, tuple(sorted(held[block]))) for block in blocks)
    atoms: list[tuple[Block, set[int]]] = []
    for block in blocks:
        cut: list[tuple[Block, set[int]]] = []
        fresh = [block]
        for atom, ranks in atoms:
            cut += [(shared, ranks | held[block]) for shared, _ in overlap(atom, block)]
            cut += [(rest, ranks) for rest in subtract(atom, block)]
            fresh = [rest for part in fresh for rest in subtract(part, atom)]
        atoms = [*cut, *((part, held[block]) for part in fresh)]
    return tuple(Owned(block, tuple(sorted(ranks))) for block, ranks in sorted(atoms, key=lambda atom: _order(atom[0])))


def _order(block: Block) -> tuple[int, int, int, int]:
    return block.offset, block.rows, block.run, block.stride
