"""The plan: immutable, and with reasons."""

from dataclasses import dataclass
from enum import StrEnum

from rolloutfleet_operator.plan.placement.request import PlacementRequest
from rolloutfleet_operator.plan.placement.tree import Tree


class Verdict(StrEnum):
    """How a fleet's plan ended."""

    PLACED = "Placed"
    DOES_NOT_FIT = "DoesNotFit"
    """Not every engine can have a place as things are: a bound or a full search says so."""
    NOT_FOUND = "NotFound"
    """No arrangement was found for every engine, and the search ended before it had looked at all of them."""
    IMPOSSIBLE = "Impossible"
    """Not one engine would fit even if the nodes were empty."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one engine stands."""

    engine: int
    nodes: tuple[str, ...]
    """One for each pod, in order of ranks."""
    gpus: int
    """Of each pod."""
    kept: bool
    """Whether it stood there before."""
    domain: str
    """The narrowest domain that holds it, in words."""
    degraded: tuple[str, ...] = ()
    """Preferences that it does not keep, in words."""


@dataclass(frozen=True, slots=True)
class Moved:
    """An engine that cannot stay where it was."""

    engine: int
    reason: str


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """One fleet's engines, in order of their numbers."""

    request: PlacementRequest
    verdict: Verdict
    engines: tuple[EnginePlace, ...]
    missing: tuple[int, ...]
    """Engines without a place."""
    moved: tuple[Moved, ...] = ()
    message: str = ""
    """What is missing and what would make it fit; empty when every engine has a place."""

    @property
    def complete(self) -> bool:
        """Whether every engine has a place."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class LevelScore:
    """GPUs of one level that lie in domains nobody uses."""

    level: str
    before: int
    after: int
    gpus: int
    """Of all domains of the level."""


@dataclass(frozen=True, slots=True)
class Score:
    """How good the plan is: what it leaves whole for the next fleet, and what it keeps of preferences."""

    levels: tuple[LevelScore, ...]
    free_before: int
    free_after: int
    degraded: int
    """Preferences that are not kept, over all engines."""

    @property
    def whole_after(self) -> int:
        """The sum over levels."""
        return sum(level.after for level in self.levels)


@dataclass(frozen=True, slots=True)
class Plan:
    """All fleets, in order of their names."""

    tree: Tree
    fleets: tuple[FleetPlan, ...]
    score: Score
    notes: tuple[str, ...] = ()
    """What was noticed about nodes and levels."""

    @property
    def complete(self) -> bool:
        """Whether every engine of every fleet has a place."""
        return all(fleet.complete for fleet in self.fleets)
