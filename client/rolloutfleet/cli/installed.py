"""Commands that another distribution brings, where it is installed: this one must not need the operator's."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Final

from rolloutfleet.cli.failure import Failure

GROUP: Final = "rolloutfleet.commands"
"""Entry points of this group are functions from arguments to an exit status, named as the command."""
BROUGHT_BY: Final = {"plan": "rolloutfleet-operator"}
"""Command -> distribution."""


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """The command of that name.

    Raises:
        Failure: its distribution is not installed.
        ImportError: the distribution is there, but not whole.
    """
    for point in entry_points(group=GROUP, name=name):
        command: Callable[[Sequence[str]], int] = point.load()
        return command
    raise Failure(
        f"{name} comes with the distribution {BROUGHT_BY[name]}, which is not installed here: pip install {BROUGHT_BY[name]}"
    )
