"""What a rank did in its last transfers: its own report of each, and the device's time for every table of copies or sums.

It wraps methods of the rank's process where they stand; events on the streams in use measure, and nothing waits that did not before.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from rolloutfleet.tiles.tables import Table
from rolloutfleet_worker.rank.receiver import Receiver

_REPORTED = ("receive_seconds", "load_seconds", "nbytes", "tensors")


@dataclass
class Watch:
    """Reports and launches since the watch began or was last read."""

    reports: list[dict[str, float]] = field(default_factory=list)
    launches: list[tuple[str, int, Any, Any]] = field(default_factory=list)

    def begin(self) -> None:
        """Wrap the rank's methods; do it once in a process."""
        launch, receive = Table._launch, Receiver.receive

        def launch_timed(table: Table, sums: torch.Tensor | None) -> None:
            kind = "+".join(word for word, there in (("copy", table._copies), ("sum", sums is not None)) if there)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch(table, sums)
            end.record()
            self.launches.append((kind, table.nbytes, begin, end))

        def receive_noted(receiver: Receiver, *arguments: Any) -> Any:
            report = receive(receiver, *arguments)
            self.reports.append({key: report[key] for key in _REPORTED if key in report})
            return report

        Table._launch = launch_timed  # type: ignore[method-assign,assignment]
        Receiver.receive = receive_noted  # type: ignore[method-assign,assignment]

    def read(self) -> dict[str, Any]:
        """What was seen since the last reading: ``reports``, and ``tables`` with their kind, bytes and seconds."""
        reports, launches = self.reports, self.launches
        self.reports, self.launches = [], []
        for *_, end in launches:
            end.synchronize()
        tables = [
            {"kind": kind, "nbytes": nbytes, "seconds": begin.elapsed_time(end) / 1e3}
            for kind, nbytes, begin, end in launches
        ]
        return {"reports": reports, "tables": tables}
