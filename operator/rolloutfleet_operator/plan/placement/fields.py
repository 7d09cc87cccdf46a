"""Reading of objects that nobody has checked: each wrong value becomes a fault that names field, value and rule, and reading goes on."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rolloutfleet_operator.errors import InvalidSpecError

Body = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Field:
    """A value, the path that leads to it, and the faults of the object that it is in. What is absent or null reads as empty."""

    value: object
    path: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def given(self) -> bool:
        """Whether there is a value."""
        return self.value is not None

    def at(self, *keys: str) -> "Field":
        """The value that the keys lead to."""
        found = self
        for key in keys:
            path = f"{found.path}[{key}]" if "/" in key else f"{found.path}.{key}".lstrip(".")
            found = Field(found.mapping().get(key), path, self.faults)
        return found

    def mapping(self) -> Body:
        """A mapping with keys that are strings."""
        return self._check({}, lambda value: isinstance(value, Mapping) and all(map(_is_text, value)), "a mapping")

    def items(self) -> list["Field"]:
        """The parts of a list."""
        values = self._check(list[object](), lambda value: isinstance(value, list), "a list")
        return [Field(value, f"{self.path}[{index}]", self.faults) for index, value in enumerate(values)]

    def text(self, default: str = "") -> str:
        """A string."""
        return self._check(default, _is_text, "a string (put quotes around it)")

    def flag(self) -> bool:
        """True or false."""
        return self._check(default=False, holds=lambda value: isinstance(value, bool), kind="true or false")

    def number(self, default: int, least: int = 0) -> int:
        """A whole number, as one writes it in a spec."""
        return self._check(
            default, lambda value: type(value) is int and value >= least, f"a whole number of at least {least}"
        )

    def count(self) -> int:
        """A whole quantity, as a number or as the string that Kubernetes makes of it."""
        whole = self._check(
            0,
            lambda value: (type(value) is int and value >= 0) or (_is_text(value) and value.isdecimal()),
            "a whole number of devices",
        )
        return int(whole)

    def choice(self, values: Iterable[str], default: str) -> str:
        """One of some strings."""
        allowed = list(values)
        return self._check(default, lambda value: value in allowed, f"one of {', '.join(allowed)}")

    def texts(self) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(each.text() for each in self.items())

    def labels(self) -> dict[str, str]:
        """A mapping of strings to strings."""
        return {key: self.at(key).text() for key in sorted(self.mapping())}

    def only(self, known: Iterable[str]) -> None:
        """Nothing but these keys; others are faults."""
        names = sorted(known)
        for key in sorted(set(self.mapping()) - set(names)):
            self.faults.append(f"{self.at(key).path} is unknown; there are {', '.join(names)}")

    def _check(self, default: _T, holds: Callable[[Any], bool], kind: str) -> _T:
        value: Any = self.value
        if value is None:
            return default
        if not holds(value):
            self.faults.append(f"{self.path or 'the object'} is {_short(value)}, but it must be {kind}")
            return default
        checked: _T = value
        return checked


def raise_faults(of: str, faults: Iterable[str]) -> None:
    """Raises InvalidSpecError with every fault of an object, each once; returns when there is none."""
    if listed := sorted(set(faults)):
        raise InvalidSpecError(f"{of}: " + "; ".join(listed))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
