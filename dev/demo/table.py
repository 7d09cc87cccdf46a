"""The demo's result, for people: one row per refit and engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

PHASES = ("Forming", "Preparing", "Pausing", "Transferring", "Verifying", "Committing", "Resuming")


def print_table(lines: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Timings of each refit, then the tokens of each engine before and after it, with transformers' beside them."""
    timings = Table(title="Seconds by phase", box=box.MARKDOWN)
    for heading in ("version", "epoch", *(phase.lower() for phase in PHASES), "paused", "MB", "live digest"):
        timings.add_column(heading, justify="right", no_wrap=True)
    outputs = Table(title="Greedy output, token ids", box=box.MARKDOWN)
    for heading in ("version", "engine", "before", "after", "transformers", "equal"):
        outputs.add_column(heading, no_wrap=True)
    for line in lines:
        result = line["result"]
        timings.add_row(
            str(result["version"]),
            str(result["epoch"]),
            *(f"{result['seconds'].get(phase, 0.0):.3f}" for phase in PHASES),
            f"{result['pauseSeconds']:.3f}",
            f"{result['nbytes'] / 1e6:.2f}",
            result["liveDigest"][:10],
        )
        for engine, tokens in sorted(line["after"].items()):
            outputs.add_row(
                str(result["version"]),
                engine,
                _tokens(line["before"].get(engine, [])),
                _tokens(tokens),
                _tokens(line["transformers"]),
                "yes" if tokens == line["transformers"] else "NO",
            )
    console.print(timings)
    console.print(outputs)


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
