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

    def window(self, phase: Phase) -> tuple[float, float]:
        """When a phase began and when the next one did, as this trainer saw it; the whole refit for a phase too short to be seen."""
        if phase not in self.phases:
            return self.began, self.ended
        begin = self.phases[phase]
        return begin, min((seen for seen in self.phases.values() if seen > begin), default=self.ended)

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
