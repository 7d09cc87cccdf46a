"""The annotation that gives retired engines another chance: who asks writes it, the operator obeys each new value once."""

from collections.abc import Iterable
from typing import Final

from rolloutfleet.contract.names import GROUP

ANNOTATION: Final = f"{GROUP}/revive"
LONGEST: Final = 256
"""Characters of a value that count."""


def render_revival(engines: Iterable[int] | None, stamp: str) -> str:
    """The value that asks for these engines, or for all of them where ``engines`` is None; the stamp makes it a new one."""
    return stamp if engines is None else f"{','.join(str(engine) for engine in sorted(set(engines)))}@{stamp}"


def parse_revival(value: str) -> frozenset[int] | None:
    """The engines that a value asks for, such as ``1,3@monday``; None for all, which any other value means."""
    named, at, _ = value.partition("@")
    numbers = named.split(",")
    if not at or not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    return frozenset(int(number) for number in numbers)
