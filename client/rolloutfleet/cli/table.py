"""Draws summaries of fleets for a terminal."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolloutfleet.cli.live import draw_gaps, draw_progress
from rolloutfleet.cli.summary import FleetSummary, PodLine, RefitLine

BAR_CELLS = 32


def draw_list(fleets: Sequence[FleetSummary]) -> RenderableType:
    """One line per fleet."""
    table = _table("NAMESPACE", "NAME", "READY", "ENGINES", "WEIGHTS", "SYNC", "MODEL", "AGE", "WHY")
    for fleet in fleets:
        condition = fleet.ready_condition
        table.add_row(
            fleet.namespace,
            Text(fleet.name, style="bold"),
            _verdict(condition.status if condition else "Unknown", good=condition is not None and condition.good),
            f"{fleet.ready}/{fleet.wanted}",
            _weights(fleet),
            fleet.phase or "-",
            fleet.model,
            fleet.age,
            "" if condition is None or condition.good else f"{condition.reason}: {condition.message}",
        )
    return table


def draw_fleet(fleet: FleetSummary, now: datetime) -> RenderableType:
    """All about one fleet."""
    parts: list[RenderableType] = [_heading(fleet), Text()]
    if fleet.conditions:
        conditions = _table("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE")
        for condition in fleet.conditions:
            verdict = _verdict(condition.status, good=condition.good)
            conditions.add_row(condition.type, verdict, condition.reason, condition.age, condition.message)
        parts += [conditions, Text()]
    else:
        parts += [Text("The operator has not reported on this fleet yet; is it running?", style="yellow"), Text()]
    parts += [_draw_pods(fleet), Text(), _draw_weights(fleet, now)]
    return Group(*parts)


def _heading(fleet: FleetSummary) -> Text:
    heading = Text()
    heading.append(f"{fleet.namespace}/{fleet.name}", style="bold")
    heading.append(f"  {fleet.model}  {fleet.ready}/{fleet.wanted} engines ready  age {fleet.age}\n")
    heading.append(f"generation {fleet.generation or '-'}  sync {fleet.sync or '-'}", style="dim")
    return heading


def _draw_pods(fleet: FleetSummary) -> RenderableType:
    if not fleet.pods_visible:
        return Text("You may not list pods here, so engines are not shown.", style="yellow")
    if not fleet.engines and not fleet.others:
        return Text("No pods yet." if fleet.wanted else "No pods: the fleet wants no engines.", style="dim")
    table = _table("ENGINE", "POD", "NODE", "READY", "STATE", "VERSION", "RESTARTS", "AGE", "PROBLEM")
    for line in (*fleet.engines, *fleet.others):
        table.add_row(*_pod_cells(line))
    return table


def _pod_cells(line: PodLine) -> tuple[RenderableType, ...]:
    ready = _verdict("True" if line.ready else "False", good=line.ready)
    cells = (line.engine or line.role, line.pod, line.node, ready, line.state, line.version or "-", str(line.restarts))
    return (*cells, line.age, line.problem)


def _draw_weights(fleet: FleetSummary, now: datetime) -> RenderableType:
    text = Text("weights ", style="bold")
    text.append(f"version {_weights(fleet)}, epoch {fleet.epoch}", style="not bold")
    if fleet.skew:
        stale = f", {fleet.stale} of them stale by leave" if fleet.stale else ""
        behind = f"{fleet.skew} engine{'' if fleet.skew == 1 else 's'} behind"
        text.append(f", {behind}{stale}", style="not bold yellow")
    text.append(f"\nsync    {fleet.phase or 'no report'}", style="not bold")
    if fleet.trainer:
        text.append(f", held by trainer {fleet.trainer}", style="not bold")
    parts: list[RenderableType] = [text]
    if fleet.progress is not None:
        parts.append(draw_progress(fleet.progress, now))
    parts += draw_gaps(fleet.gaps)
    if fleet.last_refit is None:
        parts.append(Text("last    none yet", style="dim"))
    else:
        parts += _draw_refit(fleet.last_refit)
    return Group(*parts)


def _draw_refit(refit: RefitLine) -> list[RenderableType]:
    line = Text("last    ", style="bold")
    failed = refit.outcome == "Failed"
    ago = f", {refit.age} ago" if refit.age != "-" else ""
    line.append(f"{refit.outcome or 'Unknown'}", style="not bold red" if failed else "not bold green")
    line.append(f": version {refit.version}, epoch {refit.epoch}{ago}", style="not bold")
    if failed:
        return [line, Text(f"        {refit.blame}", style="red")]
    line.append(
        f"\n        {refit.tensors} tensors, {refit.gigabytes:.3f} GB to {refit.members} engines at "
        f"{refit.gigabytes_per_second:.2f} GB/s, paused {refit.pause_seconds:.3f} s",
        style="not bold",
    )
    for sentence in _how(refit):
        line.append(f"\n        {sentence}", style="not bold dim")
    longest = max((seconds for _, seconds in refit.seconds), default=0.0)
    bars = Table.grid(padding=(0, 2))
    bars.add_column(justify="left", no_wrap=True)
    bars.add_column(justify="right", no_wrap=True)
    bars.add_column(no_wrap=True)
    for phase, seconds in refit.seconds:
        cells = round(BAR_CELLS * seconds / longest) if longest else 0
        bars.add_row(f"        {phase}", f"{seconds:.3f} s", Text("█" * cells or "▏", style="cyan"))
    return [line, bars]


def _how(refit: RefitLine) -> list[str]:
    """How the weights travelled, in sentences."""
    how = [f"{refit.reason or refit.transport}{' (staged)' if refit.staged else ''}"] if refit.transport else []
    how += [f"through vLLM's loader: {detour}" for detour in refit.detours]
    lag = f", {refit.slowest_lag_seconds:.3f} s after the middle one" if refit.slowest_lag_seconds else ""
    how += [f"last to have it: {refit.slowest}{lag}"] if refit.slowest else []
    how += [
        f"attempt {number} lost {', '.join(attempt.lost)} in {attempt.phase}: {attempt.why}"
        for number, attempt in enumerate(refit.attempts, start=1)
    ]
    return how


def _weights(fleet: FleetSummary) -> str:
    return f"{fleet.version} → {fleet.target}" if fleet.target != fleet.version else str(fleet.version)


def _verdict(status: str, *, good: bool) -> Text:
    return Text(status, style="green" if good else "red" if status != "Unknown" else "yellow")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in {"MESSAGE", "WHY", "MODEL", "PROBLEM"})
    return table
