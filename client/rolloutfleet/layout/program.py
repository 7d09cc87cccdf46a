"""The messages that carry a manifest to all ranks of one layout: trainer and workers derive the same ones apart from each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import Final

from rolloutfleet.contract.manifest import Manifest, repeated_names
from rolloutfleet.layout.blocks import Block, first_overlap
from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.layout.layout import Layout
from rolloutfleet.layout.ownership import owned_blocks, shares_of
from rolloutfleet.layout.packing import ALIGNMENT, LONE_BYTES, Fragment, Owners, Payload, pack

WORD_BYTES: Final = 4
"""Bytes of the digest's words where the geometry allows it."""

_TURNS: Final = 16
"""Blocks that several ranks hold are cut finely enough to give each of them this many turns."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a message carries for one block of a parameter."""

    source: int
    source_block: Block
    """Lies within one piece of the sender."""
    parameter: int
    block: Block
    position: int
    """Byte offset in the payload, from where the elements follow each other in the order of both blocks, without gaps."""


@dataclass(frozen=True, slots=True)
class Message:
    """One payload from one trainer rank to every rank of the layout."""

    sender: int
    nbytes: int
    parts: tuple[Part, ...]
    """In the order of their positions."""
    direct: bool
    """Whether the payload is :attr:`run` as it lies in the parameter, received in place. Other payloads are received into a bucket and
    scattered; there each part begins at a multiple of :data:`ALIGNMENT`."""

    @property
    def run(self) -> tuple[int, Block]:
        """Of a direct message: the parameter, and the one run of it that the payload is."""
        first = self.parts[0]
        return first.parameter, Block.contiguous(first.block.offset, self.parts[-1].block.end - first.block.offset)


@dataclass(frozen=True, slots=True)
class Completion:
    """A temporary, and the message with which it becomes whole."""

    parameter: int
    source: int
    message: int
    """Index of the message; -1 for a tensor without elements, which is whole from the start."""


@dataclass(frozen=True)
class Program:
    """The ordered messages of one layout, and what both sides need to know of them.

    Each sender's messages follow the order of the parameters; those of several senders alternate so that all finish together.
    """

    messages: tuple[Message, ...]
    units: tuple[int, ...]
    """By source: bytes of the digest's words, the largest of 4, 2 and 1 that the geometry of all its blocks is a multiple of, both in
    the source and in the parameters; 4 for a source that no parameter takes."""
    placed: tuple[int, ...]
    """By source: elements that parameters take from it; an element that goes to two places counts twice."""
    whole: tuple[bool, ...]
    """By source: whether every element of the tensor is taken exactly once, so that its sums are those of the tensor."""
    completions: tuple[Completion, ...]
    """The temporaries in the order in which they become whole."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all payloads, padding included."""
        return sum(message.nbytes for message in self.messages)

    def sent_by(self, rank: int) -> tuple[tuple[int, Message], ...]:
        """The messages of one trainer rank with their indices in the program, in order."""
        return tuple((index, message) for index, message in enumerate(self.messages) if message.sender == rank)


def plan_program(manifest: Manifest, layout: Layout, holdings: Sequence[Holdings], limit_bytes: int) -> Program:
    """The program that carries every element of every placement exactly once, from a trainer rank that holds it.

    It is the same whatever the order of ``holdings``. What several ranks hold is spread over them so that all send about as many bytes;
    no payload is longer than ``limit_bytes``. Raises ValueError when layout or holdings do not fit the manifest, when two holdings are
    of one rank, when elements that the layout takes are held by nobody, and for a limit below :data:`ALIGNMENT`.
    """
    if limit_bytes < ALIGNMENT:
        raise ValueError(f"limit_bytes is {limit_bytes}; a payload holds at least {ALIGNMENT} bytes")
    layout.check(manifest)
    repeated = sorted(repeated_names([str(each.rank) for each in holdings]))
    if repeated:
        raise ValueError(f"these trainer ranks have more than one holding: {', '.join(repeated)}")
    for each in holdings:
        each.check(manifest)
    fragments = _fragments(manifest, layout, holdings)
    payloads = pack(fragments, _limits(fragments, limit_bytes))
    messages = _in_turns(_dealt(payloads))
    sizes = [spec.elements for spec in manifest.tensors]
    blocks: list[list[Block]] = [[] for _ in sizes]
    for placement in layout.placements:
        blocks[placement.source].append(placement.source_block)
    placed = tuple(sum(block.elements for block in those) for those in blocks)
    return Program(
        messages=messages,
        units=_word_units(
            ((part.source, part.itemsize, part.source_block, part.block) for part in fragments), len(sizes)
        ),
        placed=placed,
        whole=tuple(map(_taken_once, sizes, blocks)),
        completions=_completions(layout, messages),
    )


def _word_units(blocks: Iterable[tuple[int, int, Block, Block]], sources: int) -> tuple[int, ...]:
    """By source: bytes of the digest's words for blocks given as (source, bytes per element, block of the source, block of a parameter)."""
    units = [WORD_BYTES] * sources
    for source, itemsize, *sides in blocks:
        for block in sides:
            units[source] = gcd(units[source], itemsize * gcd(block.offset, block.run, block.stride))
    return tuple(units)


def _fragments(manifest: Manifest, layout: Layout, holdings: Sequence[Holdings]) -> list[Fragment]:
    """All placements cut by owners, ordered by parameter and offset."""
    owned = owned_blocks(holdings)
    fragments: list[Fragment] = []
    for number, placements in groupby(layout.placements, key=lambda placement: placement.parameter):
        itemsize = layout.parameters[number].itemsize
        inside: list[Fragment] = []
        for placement in placements:
            shares = shares_of(placement.source_block, placement.block, owned.get(placement.source, ()))
            missing = placement.block.elements - sum(block.elements for _, block, _ in shares)
            if missing:
                raise ValueError(
                    f"no trainer rank holds {missing} of the {placement.block.elements} elements that parameter "
                    f"{layout.parameters[number].name} takes from {manifest.tensors[placement.source].name}"
                )
            inside += (
                Fragment(placement.source, source_block, number, block, itemsize, owners)
                for source_block, block, owners in shares
            )
        fragments += sorted(inside, key=lambda fragment: fragment.block.offset)
    return fragments


def _limits(fragments: Iterable[Fragment], limit_bytes: int) -> dict[Owners, int]:
    """Payload limits by owners: smaller where several ranks share the sending, so that they can share it evenly."""
    total: dict[Owners, int] = {}
    for fragment in fragments:
        total[fragment.owners] = total.get(fragment.owners, 0) + fragment.nbytes
    shared = {
        owners: max(LONE_BYTES, nbytes // (_TURNS * len(owners))) if len(owners) > 1 else limit_bytes
        for owners, nbytes in total.items()
    }
    return {owners: min(limit_bytes, limit) // ALIGNMENT * ALIGNMENT for owners, limit in shared.items()}


def _dealt(payloads: Sequence[Payload]) -> dict[int, list[Payload]]:
    """Payloads by sender: first those that only one rank can send, then each other one to the owner with the fewest bytes so far."""
    queues: dict[int, list[Payload]] = {}
    loads: dict[int, int] = {}
    for payload in sorted(payloads, key=lambda payload: len(payload.owners) > 1):
        sender = min(payload.owners, key=lambda rank: (loads.get(rank, 0), rank))
        queues.setdefault(sender, []).append(payload)
        loads[sender] = loads.get(sender, 0) + payload.nbytes
    return {sender: sorted(queue, key=lambda payload: payload.place) for sender, queue in queues.items()}


def _in_turns(queues: dict[int, list[Payload]]) -> tuple[Message, ...]:
    """All queues merged by how much of its own bytes each sender has sent before."""
    turns: list[tuple[int, int, int, Payload]] = []
    for sender, queue in queues.items():
        total, sent = sum(payload.nbytes for payload in queue), 0
        for index, payload in enumerate(queue):
            turns.append(((sent << 64) // total, sender, index, payload))
            sent += payload.nbytes
    return tuple(_message(sender, payload) for _, sender, _, payload in sorted(turns, key=lambda turn: turn[:3]))


def _message(sender: int, payload: Payload) -> Message:
    parts = tuple(
        Part(fragment.source, fragment.source_block, fragment.parameter, fragment.block, position)
        for fragment, position in zip(payload.fragments, payload.positions, strict=True)
    )
    return Message(sender, payload.nbytes, parts, payload.direct)


def _taken_once(size: int, blocks: Sequence[Block]) -> bool:
    if sum(block.elements for block in blocks) != size:
        return False
    return first_overlap(sorted(blocks, key=lambda block: block.offset)) is None


def _completions(layout: Layout, messages: Sequence[Message]) -> tuple[Completion, ...]:
    live = len(layout.live)
    last = {
        part.parameter: index
        for index, message in enumerate(messages)
        for part in message.parts
        if part.parameter >= live
    }
    completions = [
        Completion(live + number, detour.source, last.get(live + number, -1))
        for number, detour in enumerate(layout.detours)
    ]
    return tuple(sorted(completions, key=lambda completion: (completion.message, completion.parameter)))
