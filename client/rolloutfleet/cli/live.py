"""What the sync job itself says, for ``--url``: the whole fleet at this moment, without Kubernetes in between."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rolloutfleet.channel import Channel
from rolloutfleet.cli.arguments import Options
from rolloutfleet.cli.failure import Failure
from rolloutfleet.connecting import find_token, resolve_target
from rolloutfleet.contract.history import Gap, RefitEntry, RefitProgress
from rolloutfleet.contract.trainer import FleetView
from rolloutfleet.errors import RolloutFleetError

_SECONDS: Final = 10.0


@contextmanager
def open_channel(options: Options) -> Iterator[Channel]:
    """A connection to the sync job that ``--url`` names; Failure for a wrong address, or without a token."""
    try:
        target = resolve_target(options.url or "", options.namespace)
        channel = Channel(target, find_token(target, None, options.token_file), _SECONDS)
    except (ValueError, RolloutFleetError) as error:
        raise Failure(str(error)) from error
    try:
        yield channel
    finally:
        channel.close()


def draw_view(view: FleetView, last: RefitEntry | None, now: datetime) -> RenderableType:
    """A fleet as its sync job sees it: engines, what is under way, what is missing, how the last refit went."""
    from rolloutfleet.cli.history import describe_entry

    heading = Text(f"{view.namespace}/{view.fleet}".lstrip("/"), style="bold")
    ready = sum(member.ready for member in view.members)
    heading.append(f"  {view.model}  {ready}/{view.engines} engines ready", style="not bold")
    heading.append(f"\nversion {view.version}, epoch {view.epoch}, {view.phase}", style="not bold")
    parts: list[RenderableType] = [heading, Text(), _draw_members(view)]
    if view.progress is not None:
        parts += [Text(), draw_progress(view.progress, now)]
    if view.gaps:
        parts += [Text(), *draw_gaps(view.gaps)]
    if last is not None:
        line = Text(f"\nlast refit: version {last.version} {last.outcome}")
        parts += [line, *(Text(f"  {said}", style="dim") for said in describe_entry(last))]
    return Group(*parts)


def _draw_members(view: FleetView) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("ENGINE", "POD", "STATE", "VERSION", "BEHIND", "EPOCH", "RANKS", "READY", "PROBLEM"):
        table.add_column(column, overflow="fold", no_wrap=column != "PROBLEM")
    for member in view.members:
        behind = view.version - member.version
        table.add_row(
            str(member.engine),
            member.pod_name,
            member.state.value,
            str(member.version),
            str(behind) if behind > 0 else "-",
            str(member.epoch),
            str(member.ranks),
            Text(str(member.ready), style="green" if member.ready else "red"),
            member.message,
        )
    present = {member.engine for member in view.members}
    for engine in sorted(set(range(view.engines)) - present):
        table.add_row(str(engine), "-", "Absent", "-", "-", "-", "-", Text("False", style="red"), "has no pod")
    return table


def draw_progress(progress: RefitProgress, now: datetime) -> Text:
    """The phase with its time and its bound, and who is waited for."""
    text = Text(f"refit   version {progress.version}: {progress.phase}", style="bold")
    if progress.started_at:
        spent = max((now - datetime.fromisoformat(progress.started_at)).total_seconds(), 0.0)
        bound = f" of at most {progress.deadline_seconds:g} s" if progress.deadline_seconds else ""
        text.append(f" for {spent:.1f} s{bound}", style="not bold")
    if progress.attempt > 1:
        text.append(f", attempt {progress.attempt}", style="not bold yellow")
    if progress.waiting_for:
        text.append(f"\n        waits for {', '.join(progress.waiting_for)}", style="not bold")
    return text


def draw_gaps(gaps: tuple[Gap, ...]) -> list[Text]:
    """Why the group is not whole, a line each."""
    return [Text(f"gap     {gap.member + ' ' if gap.member else ''}{gap.what}", style="yellow") for gap in gaps]
