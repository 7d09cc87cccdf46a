"""A plot of refits as SVG: a bar for each, cut into the seconds of its phases."""

from collections.abc import Sequence
from html import escape
from typing import Final

from rolloutfleet.cli.summary import PHASES
from rolloutfleet.contract.history import RefitEntry

_WIDTH: Final = 900
_LEFT: Final = 130
_ROW: Final = 26
_TOP: Final = 84
_FONT: Final = "font-family='system-ui, sans-serif'"
COLORS: Final = {
    "Forming": "#9aa5b1",
    "Preparing": "#cbd2d9",
    "Pausing": "#f0b429",
    "Transferring": "#2680c2",
    "Verifying": "#8eddf9",
    "Committing": "#c2410c",
    "Resuming": "#3f9142",
    "Aborting": "#ba2525",
    "Reforming": "#7b341e",
}
_OTHER: Final = "#52606d"


def draw_plot(entries: Sequence[RefitEntry]) -> str:
    """An SVG document; bars share one linear scale in seconds. Raises ValueError when no refit took any time."""
    longest = max((sum(entry.seconds.values()) for entry in entries), default=0.0)
    if longest <= 0:
        raise ValueError("no refit in the history has seconds to draw")
    height = _TOP + _ROW * len(entries) + 16
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>",
        "<title>Refits by phase</title>",
        f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='16' y='28' {_FONT} font-size='16' font-weight='600' fill='#1f2933'>Refits: seconds by phase</text>",
        *_legend(entries),
    ]
    for row, entry in enumerate(entries):
        parts += _bar(entry, _TOP + _ROW * row, longest)
    return "\n".join([*parts, "</svg>", ""])


def _legend(entries: Sequence[RefitEntry]) -> list[str]:
    shown = [phase for phase in PHASES if any(phase in entry.seconds for entry in entries)]
    parts, left = [], 16
    for phase in shown:
        parts.append(f"<rect x='{left}' y='44' width='12' height='12' fill='{COLORS.get(phase, _OTHER)}'/>")
        parts.append(f"<text x='{left + 17}' y='54' {_FONT} font-size='12' fill='#1f2933'>{escape(phase)}</text>")
        left += 34 + 7 * len(phase)
    return parts


def _bar(entry: RefitEntry, top: int, longest: float) -> list[str]:
    failed = entry.outcome == "Failed"
    label = f"version {entry.version}{' failed' if failed else ''}"
    ink = "#ba2525" if failed else "#1f2933"
    parts = [
        f"<text x='{_LEFT - 10}' y='{top + 15}' text-anchor='end' {_FONT} font-size='12' fill='{ink}'>{escape(label)}</text>"
    ]
    scale, left = (_WIDTH - _LEFT - 90) / longest, float(_LEFT)
    ordered = [*(p for p in PHASES if p in entry.seconds), *sorted(set(entry.seconds) - set(PHASES))]
    for phase in ordered:
        width = entry.seconds[phase] * scale
        parts.append(
            f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='18' fill='{COLORS.get(phase, _OTHER)}'>"
            f"<title>{escape(phase)} {entry.seconds[phase]:.3f} s</title></rect>"
        )
        left += width
    total = sum(entry.seconds.values())
    parts.append(f"<text x='{left + 6:.1f}' y='{top + 14}' {_FONT} font-size='12' fill='#1f2933'>{total:.2f} s</text>")
    return parts
