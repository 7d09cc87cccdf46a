"""Whether every loop still turns: what the liveness probe asks."""

from collections.abc import Callable, Hashable


class Ticks:
    """Each loop says by when it will be heard of again."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._due: dict[Hashable, float] = {}

    def beat(self, key: Hashable, within_seconds: float) -> None:
        """The loop turns, and will be heard of again within that time."""
        self._due[key] = self._monotonic() + within_seconds

    def drop(self, key: Hashable) -> None:
        """The loop has ended on purpose."""
        self._due.pop(key, None)

    def overdue(self) -> list[str]:
        """The loops that were to be heard of and were not, sorted."""
        now = self._monotonic()
        return sorted(str(key) for key, due in self._due.items() if due < now)
