"""A faster :func:`dataclasses.replace` for the frozen, slotted values of a state: every event makes several copies of it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

Value = TypeVar("Value")

Slots = tuple[tuple[Callable[[Any], Any], Callable[[Any, Any], None]], ...]
"""Of each field, what reads and what sets it."""


@cache
def _slots(kind: Any) -> tuple[Slots, Mapping[str, Callable[[Any, Any], None]]]:
    descriptors = {field.name: getattr(kind, field.name) for field in fields(kind)}
    pairs = tuple((descriptor.__get__, descriptor.__set__) for descriptor in descriptors.values())
    return pairs, {name: descriptor.__set__ for name, descriptor in descriptors.items()}


def replaced(value: Value, changes: Mapping[str, Any]) -> Value:
    """The value with these fields changed; KeyError for a field that it does not have. It must have slots and no ``__post_init__``."""
    kind: Any = type(value)
    pairs, setters = _slots(kind)
    fresh: Value = object.__new__(kind)
    for read, write in pairs:
        write(fresh, read(value))
    for name, changed in changes.items():
        setters[name](fresh, changed)
    return fresh
