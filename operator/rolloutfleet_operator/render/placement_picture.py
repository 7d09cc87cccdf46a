"""A plan as an SVG: each rack a box, each node a row, each GPU a square in its engine's colour."""

from html import escape

from rolloutfleet_operator.plan.placement.result import Plan
from rolloutfleet_operator.render.cells import Box, Cell, Use, draw_boxes, number_engines

_SQUARE, _GAP, _ROW, _PAD, _NAME = 12, 2, 17, 12, 7
_FONT = "font-family='system-ui, sans-serif'"
_FILLS = {Use.FREE: "#ffffff", Use.OTHER: "#cbd2d9", Use.CLOSED: "#7b8794"}
_ENGINES = (
    "#c2410c",
    "#1d4ed8",
    "#15803d",
    "#a21caf",
    "#b45309",
    "#0e7490",
    "#be123c",
    "#4d7c0f",
    "#6d28d9",
    "#0f766e",
)
_WIDTH = 1000
_HEAD = 54
_LISTED = 24
"""Engines that are listed by name; more say who they are when pointed at."""


def render_picture(plan: Plan) -> str:
    """An SVG document; every square says what it is."""
    boxes = draw_boxes(plan)
    parts, below = _engines(plan)
    left, top, tallest = _PAD, below + _PAD, 0
    for box in boxes:
        wide, high = _size(box)
        if left > _PAD and left + wide + _PAD > _WIDTH:
            left, top, tallest = _PAD, top + tallest + _PAD, 0
        parts += _draw(box, left, top, wide, high)
        left, tallest = left + wide + _PAD, max(tallest, high)
    height = top + tallest + _PAD
    width = max([_WIDTH, *(_size(box)[0] + 2 * _PAD for box in boxes)])
    placed = sum(len(fleet.engines) for fleet in plan.fleets)
    wanted = sum(fleet.request.replicas for fleet in plan.fleets)
    title = f"{placed} of {wanted} engines placed"
    legend = "squares are GPUs: a colour for each engine, white free, light grey other pods, dark grey on closed nodes"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
            f"<text x='{_PAD}' y='24' {_FONT} font-size='16' font-weight='600' fill='#1f2933'>{escape(title)}</text>",
            f"<text x='{_PAD}' y='42' {_FONT} font-size='11' fill='#52606d'>{escape(legend)}</text>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _engines(plan: Plan) -> tuple[list[str], int]:
    """The list of engines with their colours, and where it ends."""
    numbers = number_engines(plan)
    if len(numbers) > _LISTED:
        return [], _HEAD
    parts, left, top = list[str](), _PAD, _HEAD
    for (fleet, engine), number in numbers.items():
        words = f"{fleet} engine {engine}"
        wide = _SQUARE + len(words) * _NAME + 2 * _PAD
        if left > _PAD and left + wide > _WIDTH:
            left, top = _PAD, top + _ROW
        fill = _ENGINES[number % len(_ENGINES)]
        parts += [
            f"<rect x='{left}' y='{top}' width='{_SQUARE}' height='{_SQUARE}' rx='2' fill='{fill}'/>",
            f"<text x='{left + _SQUARE + 6}' y='{top + 10}' {_FONT} font-size='11' fill='#1f2933'>{escape(words)}</text>",
        ]
        left += wide
    return parts, top + _ROW if parts else top


def _size(box: Box) -> tuple[int, int]:
    names = max((len(name) for name, _ in box.nodes), default=0) * _NAME
    cells = max((len(cells) for _, cells in box.nodes), default=0) * (_SQUARE + _GAP)
    return max(names + cells + 3 * _PAD, len(box.title) * _NAME + 2 * _PAD), 28 + _ROW * len(box.nodes) + 6


def _draw(box: Box, left: int, top: int, wide: int, high: int) -> list[str]:
    names = max((len(name) for name, _ in box.nodes), default=0) * _NAME
    parts = [
        f"<rect x='{left}' y='{top}' width='{wide}' height='{high}' rx='6' fill='#f5f7fa' stroke='#9aa5b1'/>",
        f"<text x='{left + _PAD}' y='{top + 18}' {_FONT} font-size='12' font-weight='600' fill='#1f2933'>{escape(box.title)}</text>",
    ]
    for row, (name, cells) in enumerate(box.nodes):
        y = top + 28 + row * _ROW
        parts.append(
            f"<text x='{left + _PAD}' y='{y + 10}' {_FONT} font-size='11' fill='#1f2933'>{escape(name)}</text>"
        )
        for column, cell in enumerate(cells):
            x = left + 2 * _PAD + names + column * (_SQUARE + _GAP)
            parts.append(
                f"<rect x='{x}' y='{y}' width='{_SQUARE}' height='{_SQUARE}' rx='2' fill='{_fill(cell)}' stroke='#9aa5b1'>"
                f"<title>{escape(_words(name, cell))}</title></rect>"
            )
    return parts


def _fill(cell: Cell) -> str:
    return _ENGINES[cell.number % len(_ENGINES)] if cell.use is Use.ENGINE else _FILLS[cell.use]


def _words(node: str, cell: Cell) -> str:
    return f"{node}: {cell.fleet} engine {cell.engine}" if cell.use is Use.ENGINE else f"{node}: {cell.use.value}"
