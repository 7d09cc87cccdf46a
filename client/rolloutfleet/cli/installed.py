"""Commands that another installed distribution adds, such as ``plan`` of the operator's."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Final

GROUP: Final = "rolloutfleet.commands"
"""Entry points of this group are functions from arguments to an exit status, named as the command."""
OWN: Final = frozenset({"status", "refit", "refit-history"})


def find_command(name: str) -> Callable[[Sequence[str]], int] | None:
    """The command of that name; None when it is one of our own, or when no distribution brings it.

    Raises:
        ImportError: the distribution is there, but not whole.
    """
    if name in OWN or name.startswith("-"):
        return None
    found = sorted(entry_points(group=GROUP, name=name), key=lambda point: point.value)
    command: Callable[[Sequence[str]], int] | None = found[0].load() if found else None
    return command
