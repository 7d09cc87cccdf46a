"""The documented constants of conditions: types, reasons and failure codes, read from the code that defines them."""

import ast
from pathlib import Path

_API = Path("operator/rolloutfleet_operator/api/conditions.py")
_STATES = Path("client/rolloutfleet/contract/worker.py")
_STANDINGS = Path("client/rolloutfleet/contract/history.py")
_SECTIONS = (
    ("Conditions of a RolloutFleet", _API, "FleetCondition"),
    ("Conditions of a WeightSync", _API, "SyncCondition"),
    ("Reasons", _API, "Reason"),
    ("States of an engine", _STATES, "WorkerState"),
    ("States of an engine that the sync job adds", _STANDINGS, "Standing"),
)
_INTRODUCTION = """\
# Conditions and reasons

Generated from the code by `make generate`. Conditions are true when they are needed: one that no longer holds goes back. `Reconciling`
and `Stalled` are the pair that kstatus reads, so `kubectl wait`, Flux and Argo CD understand a fleet.
"""


def render_conditions(root: Path) -> str:
    """Markdown with a table for each set of constants."""
    lines = [_INTRODUCTION]
    for title, path, name in _SECTIONS:
        lines += [f"## {title}", "", "| name | meaning |", "|---|---|"]
        lines += [f"| `{value}` | {meaning} |" for value, meaning in _list_constants(root / path, name)]
        lines.append("")
    return "\n".join(lines)


def _list_constants(path: Path, name: str) -> list[tuple[str, str]]:
    """Value and docstring of each constant of an enumeration, in the order of the code.

    Raises:
        ValueError: a constant has no docstring of its own.
    """
    tree = ast.parse(path.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    constants = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node, following:
            case ast.Assign(value=ast.Constant(value=str(value))), ast.Expr(value=ast.Constant(value=str(meaning))):
                constants.append((value, " ".join(meaning.split())))
            case ast.Assign(value=ast.Constant(value=str(value))), _:
                raise ValueError(f"{path.name}: {name} {value} needs a docstring below it; users read it")
    return constants
