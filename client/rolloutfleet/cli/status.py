"""``rolloutfleet status``."""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rolloutfleet.cli.arguments import Options
from rolloutfleet.cli.cluster import Cluster, FleetObjects
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.live import draw_view, open_channel
from rolloutfleet.cli.summary import summarize_fleet
from rolloutfleet.cli.table import draw_fleet, draw_list
from rolloutfleet.contract.history import RefitHistory
from rolloutfleet.contract.trainer import FleetView
from rolloutfleet.errors import RolloutFleetError

_WATCH_SECONDS: Final = 2.0
_LIVE_SECONDS: Final = 0.5


def show_status(options: Options) -> None:
    """Prints what was asked for; Failure when it cannot be had."""
    console = Console()
    if options.url is not None:
        _show_live(options, console)
        return
    cluster = Cluster(options)
    if options.watch:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(_draw(cluster.fleets(options), options), refresh=True)
                time.sleep(_WATCH_SECONDS)
    found = cluster.fleets(options)
    if options.output == "table":
        console.print(_draw(found, options))
    else:
        print(render_objects(found, options.output), end="")


def _show_live(options: Options, console: Console) -> None:
    """The fleet as its sync job sees it, once or again and again."""
    with open_channel(options) as channel:

        def look() -> RenderableType:
            try:
                view = channel.get("fleet", FleetView)
                refits = channel.get("history", RefitHistory).refits
            except RolloutFleetError as error:
                raise Failure(str(error)) from error
            return draw_view(view, refits[-1] if refits else None, datetime.now(UTC))

        if not options.watch:
            console.print(look())
            return
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(look(), refresh=True)
                time.sleep(_LIVE_SECONDS)


def render_objects(found: Sequence[FleetObjects], output: str) -> str:
    """The objects themselves as a JSON or YAML list, one element per fleet."""
    plain: list[dict[str, Any]] = [
        {
            "fleet": one.fleet,
            "weightSyncs": list(one.weight_syncs),
            "pods": None if one.pods is None else list(one.pods),
        }
        for one in found
    ]
    if output == "json":
        return json.dumps(plain, indent=2, sort_keys=True) + "\n"
    return str(yaml.safe_dump(plain, sort_keys=True))


def _draw(found: Sequence[FleetObjects], options: Options) -> RenderableType:
    now = datetime.now(UTC)
    summaries = [summarize_fleet(objects, now) for objects in found]
    if not summaries:
        return Text("No fleets found. Make one with: kubectl apply -f quickstart.yaml")
    if options.fleet is None:
        return draw_list(summaries)
    return Group(*(draw_fleet(summary, now) for summary in summaries))
