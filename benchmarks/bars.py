"""A bar chart as SVG, for a page that shows a benchmark's figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _ROW, _TOP = 760, 250, 30, 54
_FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``ours`` gives it the colour that marks the project's own."""

    label: str
    value: float
    ours: bool = False


def draw_bars(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """An SVG document; bars begin at zero and share one linear scale. Raises ValueError when there is nothing to draw."""
    longest = max((bar.value for bar in bars), default=0.0)
    if longest <= 0:
        raise ValueError(f"chart {title!r} has no bar above zero")
    height = _TOP + _ROW * len(bars) + 12
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{_WIDTH}' height='{height}' rx='12' fill='#ffffff'/>",
        f"<text x='20' y='32' {_FONT} font-size='16' font-weight='600' fill='#1f2933'>{escape(title)}</text>",
    ]
    label = f"{_FONT} font-size='13' fill='#1f2933'"
    for index, bar in enumerate(bars):
        top = _TOP + index * _ROW
        width = max((_WIDTH - _LEFT - 120) * bar.value / longest, 1.0)
        figure = f"{_number(bar.value)} {escape(unit)}"
        fill = "#c2410c" if bar.ours else "#9aa5b1"
        parts += [
            f"<text x='{_LEFT - 10}' y='{top + 15}' text-anchor='end' {label}>{escape(bar.label)}</text>",
            f"<rect x='{_LEFT}' y='{top}' width='{width:.1f}' height='20' rx='3' fill='{fill}'/>",
            f"<text x='{_LEFT + width + 8:.1f}' y='{top + 15}' {label}>{figure}</text>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
