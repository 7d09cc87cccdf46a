"""The picture of the parties and what passes between them, as SVG."""

from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 560
_FONT = "font-family='system-ui, sans-serif'"
_INK, _QUIET, _WEIGHTS = "#1f2933", "#52606d", "#c2410c"


@dataclass(frozen=True, slots=True)
class Box:
    """A party: where it stands, its name, and lines that say what it is."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """Something that passes along a line of points, with a label that stands `at` a point beside it."""

    points: tuple[tuple[int, int], ...]
    label: str
    at: tuple[int, int]
    heavy: bool = False


BOXES = (
    Box(24, 30, 224, 96, "RolloutFleet", ("what a person applies: replicas,", "model, parallelism, refit"), "#e0e8f9"),
    Box(
        376,
        30,
        234,
        96,
        "operator",
        ("one level-triggered loop a fleet:", "pods, Services, roster, sync Job"),
        "#d9f2e6",
    ),
    Box(24, 216, 224, 110, "trainer", ("rolloutfleet.connect(…).refit(…)", "rank 0 of the group"), "#fdebd3"),
    Box(
        376,
        216,
        234,
        110,
        "sync job",
        ("forms the group, drives each refit,", "commits a version; port 8080"),
        "#d9f2e6",
    ),
    Box(704, 160, 232, 84, "engine 0", ("launcher (8001), vLLM (8000)", "worker ranks from 1"), "#f3e8ff"),
    Box(704, 268, 232, 84, "engine 1", ("launcher (8001), vLLM (8000)", "the next ranks"), "#f3e8ff"),
    Box(704, 376, 232, 50, "engine n", (), "#f3e8ff"),
    Box(24, 470, 224, 66, "rollout clients", ("OpenAI-style requests",), "#fdebd3"),
    Box(376, 470, 234, 66, "Service", ("Ready engines alone",), "#e0e8f9"),
)
ARROWS = (
    Arrow(((248, 78), (376, 78)), "watch, status", (311, 70)),
    Arrow(((493, 126), (493, 216)), "Job, roster", (534, 176)),
    Arrow(((610, 78), (820, 78), (820, 160)), "pods", (715, 70)),
    Arrow(((248, 271), (376, 271)), "refit(version)", (311, 263)),
    Arrow(((610, 271), (644, 271), (644, 184), (704, 184)), "control", (666, 176)),
    Arrow(((644, 271), (644, 292), (704, 292)), "", (0, 0)),
    Arrow(((644, 292), (644, 390), (704, 390)), "", (0, 0)),
    Arrow(
        ((136, 326), (136, 412), (704, 412)),
        "weights over NCCL or Gloo, straight to every rank",
        (400, 402),
        heavy=True,
    ),
    Arrow(((674, 412), (674, 332), (704, 332)), "", (0, 0), heavy=True),
    Arrow(((674, 332), (674, 224), (704, 224)), "", (0, 0), heavy=True),
    Arrow(((248, 503), (376, 503)), "generate", (311, 495)),
    Arrow(((610, 503), (820, 503), (820, 426)), "requests", (715, 495)),
)


def render_architecture() -> str:
    """The whole picture as an SVG document that reads well on light and dark pages."""
    marker = (
        "<marker id='{name}' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='{size}' markerHeight='{size}' "
        "orient='auto-start-reverse'><path d='M0 0 L10 5 L0 10 z' fill='{colour}'/></marker>"
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>",
            "<title>Parties of a rolloutfleet and what passes between them</title>",
            f"<defs>{marker.format(name='light', colour=_QUIET, size=7)}{marker.format(name='heavy', colour=_WEIGHTS, size=4)}</defs>",
            f"<rect width='{WIDTH}' height='{HEIGHT}' rx='12' fill='#ffffff'/>",
            *(_render_arrow(arrow) for arrow in ARROWS),
            *(_render_box(box) for box in BOXES),
            "</svg>",
            "",
        ]
    )


def _render_box(box: Box) -> str:
    middle = box.x + box.width // 2
    first = box.y + box.height // 2 - 9 * len(box.lines) + 5
    frame = f"x='{box.x}' y='{box.y}' width='{box.width}' height='{box.height}' rx='8'"
    lines = [
        f"<rect {frame} fill='{box.fill}' stroke='{_QUIET}'/>",
        _render_text(middle, first, box.title, size=17, colour=_INK, weight="600"),
    ]
    lines += [
        _render_text(middle, first + 20 + 18 * number, line, size=13, colour=_QUIET, weight="400")
        for number, line in enumerate(box.lines)
    ]
    return "\n".join(lines)


def _render_arrow(arrow: Arrow) -> str:
    name, colour, width = ("heavy", _WEIGHTS, 4) if arrow.heavy else ("light", _QUIET, 1.5)
    path = " L".join(f"{x} {y}" for x, y in arrow.points)
    line = f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='{width}' marker-end='url(#{name})'/>"
    return line + (_render_text(*arrow.at, arrow.label, size=13, colour=colour, weight="500") if arrow.label else "")


def _render_text(x: int, y: int, text: str, *, size: int, colour: str, weight: str) -> str:
    return (
        f"<text x='{x}' y='{y}' text-anchor='middle' {_FONT} font-size='{size}' font-weight='{weight}' fill='{colour}'>"
        f"{escape(text)}</text>"
    )
