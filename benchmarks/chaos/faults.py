"""What is done to whom, and when: drawn from a deck that a seed shuffles, so that any run can be dealt again by its number."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from rolloutfleet.contract.policy import PauseMode, Staging
from rolloutfleet.contract.trainer import Phase


class Kind(StrEnum):
    """What happens."""

    KILL = "kill -9"
    END = "SIGTERM"
    STOP = "SIGSTOP, then SIGCONT"
    FREEZE = "SIGSTOP for good"
    CUT = "network cut, then mended"
    LOSE = "network cut for good"
    SLOW = "slow network"
    REFUSE = "API server down"
    SILENCE = "API server silent"


FATAL: Final = frozenset({Kind.KILL, Kind.END, Kind.FREEZE, Kind.LOSE})
"""What a process does not live on from."""


class Who(StrEnum):
    """To whom."""

    TRAINER = "trainer"
    RANK = "worker rank"
    LAUNCHER = "worker launcher"
    ENGINE = "worker pod"
    SYNC = "sync job"
    OPERATOR = "operator"
    API = "API server"


PHASES: Final = (
    Phase.READY,
    Phase.FORMING,
    Phase.PREPARING,
    Phase.PAUSING,
    Phase.TRANSFERRING,
    Phase.VERIFYING,
    Phase.COMMITTING,
    Phase.RESUMING,
)
"""In the order in which a refit passes them; Ready is the rest before it."""
BEFORE_DECISION: Final = frozenset(PHASES[1:6])
_PROCESSES: Final = (Who.TRAINER, Who.RANK, Who.LAUNCHER, Who.SYNC)
_SPAN_SECONDS: Final = {
    Phase.READY: 0.2,
    Phase.FORMING: 0.1,
    Phase.PREPARING: 0.1,
    Phase.PAUSING: 0.004,
    Phase.TRANSFERRING: 0.6,
    Phase.VERIFYING: 0.0,
    Phase.COMMITTING: 0.03,
    Phase.RESUMING: 0.002,
}
"""How long each phase about lasts in a run without a fault; the fault comes at a drawn moment within it."""
_EARLY: Final = 0.05
BLOCK: Final = 12
"""Runs that one fleet serves before a new one, perhaps of another shape, is started."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One run's fault."""

    kind: Kind
    who: Who
    phase: Phase
    engine: int
    """Which engine, for faults of workers."""
    after_seconds: float
    """From the beginning of the phase."""
    lasts_seconds: float
    """Until it is undone, for faults that are."""
    new_group: bool
    """Whether the refit forms a group, instead of using the one that is kept."""

    def __str__(self) -> str:
        whom = f"{self.who} {self.engine}" if self.who in {Who.RANK, Who.LAUNCHER, Who.ENGINE} else str(self.who)
        return f"{self.kind} of {whom} in {self.phase} after {self.after_seconds:.3f} s"


Card = tuple[Kind, Who, Phase]


def parse_card(text: str) -> Card:
    """``kill,rank,Transferring`` as a fault; ValueError when there is no such."""
    try:
        kind, who, phase = text.split(",")
        return Kind[kind.upper()], Who[who.upper()], Phase(phase)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{text!r} is no fault: give KIND,WHO,PHASE of {'|'.join(Kind.__members__).lower()}, "
            f"{'|'.join(Who.__members__).lower()}, {'|'.join(PHASES)}"
        ) from error


def _deck() -> list[Card]:
    """Every fault once, kills three times, those that take long for one or a few phases."""
    cards = [(Kind.KILL, who, phase) for who in _PROCESSES for phase in PHASES] * 3
    cards += [(Kind.KILL, who, Phase.TRANSFERRING) for who in (Who.RANK, Who.LAUNCHER)] * 3
    some = (Phase.FORMING, Phase.PREPARING, Phase.TRANSFERRING, Phase.COMMITTING)
    cards += [(Kind.END, who, phase) for who in (Who.LAUNCHER, Who.SYNC) for phase in (Phase.READY, *some)]
    cards += [(Kind.STOP, who, phase) for who in _PROCESSES for phase in some]
    cards += [(Kind.FREEZE, who, Phase.TRANSFERRING) for who in _PROCESSES]
    reached = (Who.TRAINER, Who.ENGINE, Who.SYNC)
    cards += [(Kind.CUT, who, phase) for who in reached for phase in some]
    cards += [(Kind.LOSE, who, Phase.TRANSFERRING) for who in reached]
    early = (Phase.FORMING, Phase.PREPARING)
    cards += [(kind, Who.TRAINER, phase) for kind in (Kind.FREEZE, Kind.LOSE) for phase in early]
    cards += [(Kind.SLOW, who, Phase.TRANSFERRING) for who in (Who.TRAINER, Who.ENGINE)]
    down = (Phase.READY, Phase.FORMING, Phase.TRANSFERRING, Phase.COMMITTING)
    cards += [(kind, Who.API, phase) for kind in (Kind.REFUSE, Kind.SILENCE) for phase in down]
    return cards


def deal(seed: int, number: int, engines: int, *, simple: bool = False) -> Fault:
    """The fault of a run; ``simple`` leaves out all but kills, and brings them early, for weights of a few hundred kilobytes."""
    cards = _deck()
    if simple:
        cards = sorted({card for card in cards if card[0] is Kind.KILL})
    random.Random(f"deck {seed} {number // len(cards)}").shuffle(cards)
    fault = draw_fault(seed, number, cards[number % len(cards)], engines)
    return replace(fault, after_seconds=fault.after_seconds * _EARLY) if simple else fault


def deal_cluster(seed: int, number: int, engines: int, card: Card | None = None) -> Fault:
    """The fault of a run in a cluster: kills and halts of whatever is a process there, in phases that last long enough to be met.

    ``card`` is the fault instead of what is dealt.
    """
    parties = (Who.TRAINER, Who.RANK, Who.LAUNCHER, Who.SYNC, Who.OPERATOR)
    phases = (Phase.READY, Phase.FORMING, Phase.PREPARING, Phase.TRANSFERRING, Phase.COMMITTING)
    cards = [(Kind.KILL, who, phase) for who in parties for phase in phases]
    cards += [(Kind.END, who, Phase.TRANSFERRING) for who in (Who.LAUNCHER, Who.SYNC, Who.OPERATOR)]
    cards += [(Kind.END, Who.LAUNCHER, phase) for phase in (Phase.FORMING, Phase.PREPARING, Phase.COMMITTING)]
    cards += [(Kind.STOP, who, Phase.TRANSFERRING) for who in parties]
    cards += [(Kind.SILENCE, Who.API, phase) for phase in phases]
    random.Random(f"cluster {seed} {number // len(cards)}").shuffle(cards)
    fault = draw_fault(seed, number, card or cards[number % len(cards)], engines)
    return replace(fault, after_seconds=fault.after_seconds * _EARLY)


def draw_fault(seed: int, number: int, card: Card, engines: int) -> Fault:
    """A fault of this kind, its moment and its other circumstances drawn for a run."""
    kind, who, phase = card
    draw = random.Random(f"run {seed} {number}")
    return Fault(
        kind=kind,
        who=who,
        phase=phase,
        engine=draw.randrange(engines),
        after_seconds=draw.random() * _SPAN_SECONDS[phase],
        lasts_seconds=draw.uniform(1.0, 4.0),
        new_group=phase is Phase.PREPARING or draw.random() < 0.3,
    )


def policy_of(seed: int, number: int) -> tuple[Staging, PauseMode]:
    """How the fleet of a run's block refits: each way in turn, the first one by the seed."""
    ways = ((Staging.NEVER, PauseMode.KEEP), (Staging.AUTO, PauseMode.KEEP), (Staging.AUTO, PauseMode.WAIT))
    return ways[(seed + number // BLOCK) % len(ways)]
