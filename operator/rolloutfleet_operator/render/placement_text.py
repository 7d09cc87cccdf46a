"""A plan for a terminal: fleets and ranks, the domain tree, and a picture of the racks."""

from collections.abc import Iterator, Sequence

from rolloutfleet_operator.plan.placement.ranks import plan_ranks
from rolloutfleet_operator.plan.placement.result import FleetPlan, Plan
from rolloutfleet_operator.render.cells import Box, Cell, Use, draw_boxes, number_engines

_MARKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SIGNS = {Use.FREE: "·", Use.OTHER: "▒", Use.CLOSED: "#"}
_BOXES = 60
_DOMAINS = 40


def render_text(plan: Plan, width: int = 100, first_rank: int = 1) -> str:
    """The whole plan; lines of the picture are at most ``width`` wide where a single rack allows."""
    parts: list[str] = []
    for fleet in plan.fleets:
        parts += [*_fleet(plan, fleet, first_rank), ""]
    parts += [*_tree(plan), "", *_picture(plan, width), "", *_score(plan)]
    if plan.notes:
        parts += ["", "Noticed:", *(f"  {note}" for note in plan.notes[:_DOMAINS])]
        if len(plan.notes) > _DOMAINS:
            parts.append(f"  and {len(plan.notes) - _DOMAINS} more")
    return "\n".join(line.rstrip() for line in parts) + "\n"


def _fleet(plan: Plan, fleet: FleetPlan, first_rank: int) -> Iterator[str]:
    request, sizes = fleet.request, fleet.request.parallelism
    placed = f"{len(fleet.engines)} of {request.replicas} engines placed ({fleet.verdict.value})"
    yield f"{request.fleet}: {placed}, {sizes} = {sizes.world} GPUs each"
    if fleet.message:
        yield f"  {fleet.message}"
    yield f"  read from the spec: {', '.join(request.fields) or 'nothing, so defaults'}"
    pods: dict[int, list[str]] = {}
    for each in plan_ranks(plan.tree, fleet, first_rank):
        pods.setdefault(each.engine, []).append(f"{each.node} {_span(each.first, each.count)}")
    numbers = number_engines(plan)
    places = {place.engine: place for place in fleet.engines}
    rows = [
        (
            _mark(numbers[request.fleet, engine]),
            str(engine),
            places[engine].domain,
            "stays" if places[engine].kept else "new",
            ", ".join(nodes),
        )
        for engine, nodes in pods.items()
    ]
    yield from _columns([("", "ENGINE", "IN", "", "NODES AND RANKS"), *rows])
    for place in fleet.engines:
        for words in place.degraded:
            yield f"  engine {place.engine}: {words}"
    for moved in fleet.moved:
        yield f"  engine {moved.engine} moves: {moved.reason}"


def _span(first: int, count: int) -> str:
    return f"[{first}]" if count == 1 else f"[{first}-{first + count - 1}]"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            yield "  " + "  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _tree(plan: Plan) -> Iterator[str]:
    """Domains above single nodes, with their GPUs and engines."""
    tree = plan.tree
    size = len(tree.parent)
    total, engines = [0] * size, [0] * size
    for leaf, node in tree.node_at.items():
        for domain in (0, *tree.path(leaf)):
            total[domain] += node.gpus
    for fleet in plan.fleets:
        for place in fleet.engines:
            engines[tree.meeting(tree.leaf[node] for node in place.nodes)] += 1
    # Engines are counted where all of their pods meet, and in everything around that.
    for domain in range(size - 1, 0, -1):
        engines[tree.parent[domain]] += engines[domain]
    shown = [domain for domain in range(size) if tree.depth[domain] < tree.hosts and tree.known[domain]]
    for domain in shown[:_DOMAINS]:
        indent = "  " * sum(tree.known[each] for each in tree.path(domain))
        nodes = len(tree.leaves(domain))
        words = f"{_counted(nodes, 'node')}, {total[domain]} GPUs, {_counted(engines[domain], 'engine')} within"
        yield f"{indent}{tree.title(domain)}: {words}"
    if len(shown) > _DOMAINS:
        yield f"and {len(shown) - _DOMAINS} more domains"


def _mark(number: int) -> str:
    return _MARKS[number % len(_MARKS)]


def _sign(cell: Cell) -> str:
    return _mark(cell.number) if cell.use is Use.ENGINE else _SIGNS[cell.use]


def _picture(plan: Plan, width: int) -> Iterator[str]:
    boxes = draw_boxes(plan)
    chosen = boxes if len(boxes) <= _BOXES else [box for box in boxes if box.has_engine][:_BOXES]
    line: list[list[str]] = []
    used = 0
    for box in chosen:
        block = _box(box)
        if line and used + len(block[0]) + 1 > width:
            yield from _beside(line)
            line, used = [], 0
        line.append(block)
        used += len(block[0]) + 1
    yield from _beside(line)
    if len(chosen) < len(boxes):
        yield f"and {len(boxes) - len(chosen)} more like these"
    legend = "one sign is one GPU: an engine's sign, " + ", ".join(
        f"{sign} {use.value}" for use, sign in _SIGNS.items()
    )
    yield legend


def _box(box: Box) -> list[str]:
    names = max((len(name) for name, _ in box.nodes), default=0)
    rows = [f"{name.ljust(names)} {''.join(map(_sign, cells))}" for name, cells in box.nodes]
    inner = max(len(box.title), *map(len, rows)) if rows else len(box.title)
    return [
        f"┌─{box.title.ljust(inner, '─')}─┐",
        *(f"│ {row.ljust(inner)} │" for row in rows),
        f"└─{'─' * inner}─┘",
    ]


def _beside(blocks: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in range(max(map(len, blocks), default=0)):
        yield " ".join(block[row] if row < len(block) else " " * len(block[0]) for block in blocks)


def _score(plan: Plan) -> Iterator[str]:
    score = plan.score
    yield f"GPUs free: {score.free_before} before, {score.free_after} after"
    for level in score.levels:
        yield f"  in whole {level.level} domains: {level.before} before, {level.after} after"
