"""Seconds from the kill of an engine's process in mid-transfer to all survivors serving the new version.

``python -m fakes.reform_seconds RUNS [MEGABYTES]``, in a Python that has torch, prints a line for each run and the medians.

Real control surfaces, a real sync job, the real client and gloo over TCP on this machine; engines hold weights and generate nothing.
``detect`` is the time until the abort begins, ``abort`` until every survivor is free, ``reform`` until they are ready for the bytes
again, ``resend`` until the version is committed and every survivor serves it.
"""

import asyncio
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch

from fakes.process_fleet import ProcessFleet
from rolloutfleet.contract.trainer import Phase, RefitView

ENGINES = 3
PARTS = ("detect", "abort", "reform", "resend", "total")


class Phases:
    """When the refit first stood in each phase of each attempt."""

    def __init__(self, fleet: ProcessFleet) -> None:
        self._fleet = fleet
        self.seen: dict[tuple[int, Phase], float] = {}

    async def follow(self) -> None:
        runtime = self._fleet.runtime
        while True:
            refit = runtime.state.refit
            if refit is not None and refit.version == 2:
                self.seen.setdefault((refit.attempt, refit.phase), time.monotonic())
            await runtime.wait_for_change(float("inf"))


def measure(weights: dict[str, Any], delay: float) -> dict[str, float]:
    """The parts of one run, in which the second of three engines is killed this long after the transfer has begun."""
    with ProcessFleet(ENGINES) as fleet, fleet.connect() as trainer:
        trainer.refit(weights, version=1)
        phases = Phases(fleet)
        following = asyncio.run_coroutine_threadsafe(phases.follow(), fleet.loop)
        killed: list[float] = []

        def kill(view: RefitView) -> None:
            if view.phase is Phase.TRANSFERRING and not killed:
                time.sleep(delay)
                killed.append(time.monotonic())
                fleet.kill(1)

        result = trainer.refit(weights, version=2, progress=kill)
        complete = time.monotonic()
        following.cancel()
        assert result.members == (fleet.names[0], fleet.names[2]), result
        at = phases.seen
        aborting, reforming = at[1, Phase.ABORTING], at[2, Phase.REFORMING]
        transferring = at[2, Phase.TRANSFERRING]
    moments = (killed[0], aborting, reforming, transferring, complete)
    parts = [after - before for before, after in pairwise(moments)]
    return dict(zip(PARTS, [*parts, complete - killed[0]], strict=True))


def main(runs: int, megabytes: int) -> None:
    weights = {f"layer.{index}": torch.rand((megabytes << 20) // 64) for index in range(16)}
    table = []
    print(" ".join(f"{part:>8}" for part in PARTS))
    for run in range(runs):
        table.append(measure(weights, 0.02 * (run % 5)))
        print(" ".join(f"{table[-1][part]:8.3f}" for part in PARTS), flush=True)
    print(" ".join(f"{statistics.median(row[part] for row in table):8.3f}" for part in PARTS), "median")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 512)
