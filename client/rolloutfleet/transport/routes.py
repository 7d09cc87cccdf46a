"""Along which ranks a message travels to its audience, and which messages travel together. Pure; all members derive the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MESSAGE_BYTES: Final = 64 << 20
"""Largest message of a program: what is packed, forwarded and taken into a digest in one piece."""

STEP_BYTES: Final = 256 << 20
"""Messages that are begun together, all audiences counted; enough that starting them costs little beside moving them."""

CHAIN_STEP_BYTES: Final = 64 << 20
"""The same where ranks forward: the last one is behind by one such step for each rank before it."""


class Route(StrEnum):
    """How a message reaches every rank of an audience."""

    EACH = "Each"
    """Its sender sends it to every rank."""
    BROADCAST = "Broadcast"
    """One collective of the whole group; possible for the only sender with an audience of all workers."""
    CHAIN = "Chain"
    """Its sender sends it to the first rank, and every rank forwards it to the next."""


@dataclass(frozen=True, slots=True)
class Audience:
    """The worker ranks with one and the same layout, ascending."""

    layout: str
    ranks: tuple[int, ...]


def choose_route(audience: Audience, audiences: int, trainer_ranks: int) -> Route:
    """A collective where one can be used, else a chain for several ranks; ``audiences`` counts those of the whole group."""
    if audiences == 1 and trainer_ranks == 1:
        return Route.BROADCAST
    return Route.CHAIN if len(audience.ranks) > 1 else Route.EACH


def check_route(route: Route, audiences: int, trainer_ranks: int) -> None:
    """ValueError when the route cannot serve an audience of such a group."""
    if route is Route.BROADCAST and (audiences > 1 or trainer_ranks > 1):
        raise ValueError(
            f"route Broadcast reaches every rank from one sender, but there are {trainer_ranks} trainer ranks and {audiences} different "
            "layouts; use Chain or Each"
        )


def first_hops(route: Route, audience: Audience) -> tuple[int, ...]:
    """The ranks to which a sender sends."""
    return audience.ranks[:1] if route is Route.CHAIN else audience.ranks


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank of an audience stands in the route."""

    before: int | None
    """The rank that forwards to this one; None where every message comes from its sender."""
    after: int | None
    """The rank to which this one forwards."""


def place_of(route: Route, audience: Audience, rank: int) -> Place:
    """The place of a rank of the audience."""
    if route is not Route.CHAIN:
        return Place(None, None)
    index = audience.ranks.index(rank)
    return Place(
        audience.ranks[index - 1] if index else None,
        audience.ranks[index + 1] if index + 1 < len(audience.ranks) else None,
    )


def step_limit(route: Route, audiences: int) -> int:
    """Bytes that one audience has in a step."""
    whole = CHAIN_STEP_BYTES if route is Route.CHAIN else STEP_BYTES
    return max(MESSAGE_BYTES, whole // audiences)


def cut_steps(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Consecutive messages of at most ``limit`` bytes together, a larger one by itself, as ranges of their indices."""
    steps: list[range] = []
    start = filled = 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            steps.append(range(start, index))
            start, filled = index, 0
        filled += size
    if start < len(sizes):
        steps.append(range(start, len(sizes)))
    return tuple(steps)


__all__ = [
    "CHAIN_STEP_BYTES",
    "MESSAGE_BYTES",
    "STEP_BYTES",
    "Audience",
    "Place",
    "Route",
    "check_route",
    "choose_route",
    "cut_steps",
    "first_hops",
    "place_of",
    "step_limit",
]
