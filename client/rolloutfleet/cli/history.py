"""``rolloutfleet refit-history``: the refits that a fleet remembers, as a table, as JSON, or as a plot."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rolloutfleet.cli.arguments import Options
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.live import open_channel
from rolloutfleet.cli.plot import draw_plot
from rolloutfleet.cli.summary import PHASES, show_age
from rolloutfleet.contract.history import RefitEntry, RefitHistory
from rolloutfleet.errors import RolloutFleetError

SHORT: Final = {"Preparing": "prep", "Transferring": "transfer", "Committing": "commit"}


def show_history(options: Options) -> None:
    """Prints what was asked for; Failure when it cannot be had."""
    entries = read_history(options)
    if options.plot is not None:
        try:
            options.plot.write_text(draw_plot(entries))
        except (OSError, ValueError) as error:
            raise Failure(f"no plot at {options.plot}: {error}") from error
    if options.output == "json":
        rows = [entry.model_dump(mode="json", by_alias=True) for entry in entries]
        print(json.dumps(rows, indent=2))
    else:
        Console().print(draw_history(entries, datetime.now(UTC)))


def read_history(options: Options) -> list[RefitEntry]:
    """The refits of one fleet, the oldest first: from its sync job, or from the status of its WeightSyncs."""
    if options.url is not None:
        try:
            with open_channel(options) as channel:
                return list(channel.get("history", RefitHistory).refits)
        except RolloutFleetError as error:
            raise Failure(str(error)) from error
    from rolloutfleet.cli.cluster import Cluster

    (found,) = Cluster(options).fleets(options)
    return merge_entries(sync.get("status") or {} for sync in found.weight_syncs)


def merge_entries(statuses: Iterable[Mapping[str, Any]]) -> list[RefitEntry]:
    """The refits of all WeightSyncs of a fleet in the order in which they ended."""
    try:
        entries = [RefitEntry.model_validate(entry) for status in statuses for entry in status.get("refits") or ()]
    except ValidationError as error:
        raise Failure(f"the history in the status cannot be understood: {error}") from error
    return sorted(entries, key=lambda entry: entry.finished_at or "")


def draw_history(entries: Sequence[RefitEntry], now: datetime) -> RenderableType:
    """One line for each refit, and more where something was lost."""
    if not entries:
        return Text("No refit has ended yet.", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = (
        "VERSION",
        "EPOCH",
        "OUTCOME",
        "AGE",
        "TRIES",
        "ENGINES",
        "SECONDS",
        "PAUSE",
        "GB/S",
        "TRANSPORT",
        "DETAILS",
    )
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "DETAILS")
    for entry in entries:
        failed = entry.outcome == "Failed"
        table.add_row(
            str(entry.version),
            str(entry.epoch),
            Text(entry.outcome, style="red" if failed else "green"),
            show_age(entry.finished_at, now),
            str(len(entry.attempts) + 1),
            f"{entry.members}/{entry.engines}" if entry.engines else str(entry.members),
            f"{sum(entry.seconds.values()):.3f}",
            f"{entry.pause_seconds:.3f}",
            f"{entry.gigabytes_per_second:.2f}",
            f"{entry.transport or '-'}{' staged' if entry.staged else ''}",
            "\n".join(describe_entry(entry)),
        )
    return table


def describe_entry(entry: RefitEntry) -> list[str]:
    """Seconds by phase, the slowest rank, who was missing or lost and where, and why it failed."""
    known = [phase for phase in PHASES if phase in entry.seconds]
    order = [*known, *sorted(set(entry.seconds) - set(known))]
    lines = (
        [", ".join(f"{SHORT.get(phase, phase.lower())} {entry.seconds[phase]:.3f}" for phase in order)] if order else []
    )
    if entry.slowest:
        lines.append(f"slowest: {entry.slowest}, {entry.slowest_lag_seconds:.3f} s after the middle one")
    if entry.missing:
        lines.append(f"missing: {', '.join(entry.missing)}")
    for number, attempt in enumerate(entry.attempts, start=1):
        lost = ", ".join(attempt.lost)
        lines.append(f"attempt {number} (epoch {attempt.epoch}) lost {lost} in {attempt.phase}: {attempt.why}")
    if entry.message:
        where = f"{entry.code} in {entry.phase}" + (f" at {entry.member}" if entry.member else "")
        lines.append(f"{where}: {entry.message}")
    return lines
