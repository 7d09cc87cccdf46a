"""Writes the table of docs/data-path.md, and a chart beside it, from the results in docs/benchmarks.

By hand, after a run: ``python3 -m benchmarks.page``. Nothing is typed in: what no run has measured is not in the table.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, draw_bars
from benchmarks.record import RESULTS, ROOT, say

PAGE = Path("docs/data-path.md")
CHART = Path("docs/benchmarks/refit_colocated.svg")
_BEGIN, _END = "<!-- figures: written by python3 -m benchmarks.page -->", "<!-- end of figures -->"
NAMES = ("refit_colocated", "refit_dense_7b", "refit_moe_30b", "correctness", "lifecycle", "tiles")
_SHOWN = {"tiles": ("copy_times_flat", "sums_gbps", "sums_percent_of_read", "copy_and_sum_times_flat")}
"""Of files with many figures, the ends of the names of those that a reader of the page looks for."""


def write_table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: one section for each result, with its figures as the file has them, to four digits."""
    lines: list[str] = []
    for name, content in results.items():
        lines += ["", f"**{name}** on {content['machine']}, commit `{content['commit'][:12]}`", ""]
        lines += ["| figure | value |", "|---|---|"]
        shown = [item for item in content["figures"].items() if item[0].endswith(_SHOWN.get(name, ("",)))]
        lines += [f"| {figure} | {value:.4g} |" for figure, value in shown]
        lines += [
            "",
            *(f"Not measured, for {part} ended early: {why}" for part, why in content.get("failures", {}).items()),
        ]
    return "\n".join(lines).rstrip() + "\n"


def replace_table(page: str, table: str) -> str:
    """The page with the table between its two marks; ValueError when they are not there."""
    head, found, rest = page.partition(_BEGIN)
    _, ended, tail = rest.partition(_END)
    if not found or not ended:
        raise ValueError(f"{PAGE} lacks the marks {_BEGIN} and {_END}")
    return f"{head}{_BEGIN}\n{table}\n{_END}{tail}"


def chart(figures: dict[str, float]) -> str | None:
    """The dense model's refit on one GPU as bars; None while the figures are not there."""
    bars = [
        Bar("flat copy (floor)", figures.get("floor_seconds", 0.0) * 1e3),
        Bar("ours: copy", figures.get("copy_seconds_digest_off", 0.0) * 1e3, ours=True),
        Bar("ours: copy with digests", figures.get("copy_seconds_digest_on", 0.0) * 1e3, ours=True),
        Bar("ours: whole refit", figures.get("refit_seconds_digest_on", 0.0) * 1e3, ours=True),
        Bar("vLLM: reload_weights", figures.get("vllm_reload_seconds", 0.0) * 1e3),
        Bar("vLLM: ipc engine", figures.get("vllm_ipc_seconds", 0.0) * 1e3),
    ]
    if not all(bar.value for bar in bars):
        return None
    return draw_bars("15.2 GB on one GPU, from another process", "ms", bars)


def main() -> int:
    results = {
        name: json.loads(path.read_text()) for name in NAMES if (path := ROOT / RESULTS / f"{name}.json").exists()
    }
    page = ROOT / PAGE
    page.write_text(replace_table(page.read_text(), write_table(results)))
    say(f"{PAGE}: figures of {', '.join(results) or 'nothing yet'}")
    drawn = chart(results.get("refit_colocated", {}).get("figures", {}))
    if drawn is not None:
        (ROOT / CHART).write_text(drawn)
        say(f"{CHART} drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
