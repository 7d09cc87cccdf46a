"""Refits of a fleet from this process, with the time of everything that the trainer sees."""

import time
from dataclasses import dataclass, field
from typing import Any

import rolloutfleet
from benchmarks.floors import synchronize
from rolloutfleet.contract.trainer import Phase, RefitResult, RefitView


@dataclass
class Measured:
    """One refit."""

    result: RefitResult
    seconds: float
    """From the call to its return."""
    began: float
    """Monotonic clock, the same for all processes of a machine."""
    wall: float
    """Seconds since the epoch when it began."""
    phases: dict[Phase, float] = field(default_factory=dict)
    """Monotonic clock when this trainer first saw each phase."""

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    @property
    def arriving(self) -> tuple[float, float]:
        """When this version's bytes were on their way or being proved, beside engines that serve: up to the commit, as this trainer saw it.

        The whole refit where that was too short to be seen.
        """
        seen = [self.phases[phase] for phase in (Phase.TRANSFERRING, Phase.VERIFYING) if phase in self.phases]
        if not seen:
            return self.began, self.ended
        return min(seen), self.phases.get(Phase.COMMITTING, self.ended)

    def as_run(self, **also: Any) -> dict[str, Any]:
        """For the file."""
        seen = {str(phase): round(at - self.began, 6) for phase, at in self.phases.items()}
        return {**also, "refit_seconds": self.seconds, "phases_seen_at": seen, **self.result.model_dump(mode="json")}


def measured_refit(trainer: rolloutfleet.Fleet, weights: Any, version: int, seconds: float = 300.0) -> Measured:
    """One refit of these weights; raises what :meth:`rolloutfleet.Fleet.refit` raises."""
    phases: dict[Phase, float] = {}

    def note(view: RefitView) -> None:
        phases.setdefault(view.phase, time.monotonic())

    synchronize()
    began, wall = time.monotonic(), time.time()
    result = trainer.refit(weights, version, timeout=seconds, progress=note)
    return Measured(result=result, seconds=time.monotonic() - began, began=began, wall=wall, phases=phases)


def next_version(trainer: rolloutfleet.Fleet) -> int:
    """The version after the fleet's."""
    return trainer.view().version + 1
