"""How engines pick tokens; every rule is checked before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one generation call.

    Raises ValueError naming the parameter, its value and the rule.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    """Share of probability mass that is kept, in (0, 1]."""
    top_k: int | None = None
    """Number of tokens that are kept; None and -1 keep all."""
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.top_k is not None and not (_is_integer(self.top_k) and (self.top_k == -1 or self.top_k >= 1)):
            raise ValueError(
                f"top_k is {self.top_k!r}; it must be None or -1 (keep all tokens), or an integer of at least 1"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1")
        if not (_is_number(self.temperature) and 0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature is {self.temperature!r}; it must be a number of at least 0")
        if not (_is_integer(self.max_new_tokens) and self.max_new_tokens >= 1):
            raise ValueError(f"max_new_tokens is {self.max_new_tokens!r}; it must be an integer of at least 1")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is {self.stop!r}; it must be a list or tuple of strings")  # noqa: TRY004 - one kind for callers

    def request_fields(self, *, greedy: bool) -> dict[str, Any]:
        """The fields of a completion request; ``greedy`` takes the most likely token whatever temperature, top_p and top_k say."""
        fields: dict[str, Any] = {"max_tokens": self.max_new_tokens, "ignore_eos": self.ignore_eos}
        if greedy:
            fields |= {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
        else:
            fields |= {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": -1 if self.top_k is None else self.top_k,
            }
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.stop:
            fields["stop"] = list(self.stop)
        if self.stop_token_ids:
            fields["stop_token_ids"] = list(self.stop_token_ids)
        return fields


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
