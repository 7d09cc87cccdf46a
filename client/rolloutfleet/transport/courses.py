"""What trainer and worker derive alike for one audience: the program, its route, and which messages travel together. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.layout.layout import Layout
from rolloutfleet.layout.program import Program, plan_program
from rolloutfleet.transport.routes import (
    MESSAGE_BYTES,
    Audience,
    Route,
    check_route,
    choose_route,
    cut_steps,
    first_hops,
    place_of,
    step_limit,
)


@dataclass(frozen=True, slots=True)
class Course:
    """How one audience gets a manifest."""

    audience: Audience
    route: Route
    layout: Layout
    program: Program
    steps: tuple[range, ...]
    """Indices of the messages that are begun together."""
    fingerprint: bytes
    """32 bytes that two ranks derive alike only if they agree on every message, so that neither waits for one that never comes."""

    def pairs(self, trainer_ranks: int) -> frozenset[tuple[int, int]]:
        """Every (from, to) between which something of this course travels by itself; empty for a collective."""
        if self.route is Route.BROADCAST:
            return frozenset()
        ranks = self.audience.ranks
        hops = {(sender, rank) for sender in range(trainer_ranks) for rank in first_hops(self.route, self.audience)}
        # Trainer rank 0 tells every rank what it must hold.
        hops |= {(0, rank) for rank in ranks}
        for rank in ranks:
            after = place_of(self.route, self.audience, rank).after
            if after is not None:
                hops.add((rank, after))
        return frozenset(hops)


def audiences_of(layouts: Mapping[int, str]) -> tuple[Audience, ...]:
    """The audiences of all worker ranks, from each rank's layout digest; in the order of their first ranks."""
    members: dict[str, list[int]] = {}
    for rank in sorted(layouts):
        members.setdefault(layouts[rank], []).append(rank)
    return tuple(Audience(layout, tuple(ranks)) for layout, ranks in members.items())


def plan_course(
    manifest: Manifest,
    layout: Layout,
    holdings: Sequence[Holdings],
    audience: Audience,
    audiences: int,
    route: Route | None = None,
) -> Course:
    """The course of one audience out of ``audiences``; ValueError when ``route`` cannot serve it, or what planning raises."""
    trainer_ranks = len(holdings)
    if route is None:
        route = choose_route(audience, audiences, trainer_ranks)
    else:
        check_route(route, audiences, trainer_ranks)
    program = plan_program(manifest, layout, holdings, MESSAGE_BYTES)
    steps = cut_steps([message.nbytes for message in program.messages], step_limit(route, audiences))
    return Course(audience, route, layout, program, steps, _fingerprint(route, layout, program, steps))


def _fingerprint(route: Route, layout: Layout, program: Program, steps: tuple[range, ...]) -> bytes:
    digest = hashlib.sha256(f"{route} {layout.digest} {program.units} {steps}".encode())
    for message in program.messages:
        digest.update(repr(message).encode())
    return digest.digest()


__all__ = ["Course", "audiences_of", "plan_course"]
