"""What a refit costs those who generate: tokens per second while weights arrive and are proved, and time between tokens across it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.load import Arrival, latencies, percentile, refusals, tokens_per_second
from benchmarks.refits import Measured

AFTER_SECONDS = 0.5
"""A stream that stood still shows it at its next token."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Serving before refits and across them; seconds and tokens per second."""

    before_tokens_per_second: float
    receiving_tokens_per_second: float
    kept_percent: float
    before_p50: float
    before_p99: float
    across_p50: float
    across_p99: float
    across_longest: float
    refused: int

    def as_run(self) -> dict[str, float]:
        return asdict(self)


Window = tuple[float, float]
"""Seconds of the machine's monotonic clock."""


def summarize(arrivals: Sequence[Arrival], quiet: Sequence[Window], refits: Sequence[Measured]) -> Serving:
    """Serving in windows without refits beside serving while these refits' bytes were arriving and being proved, and across them whole.

    Windows of a kind count as one, by their length. Raises ValueError when there was none.
    """
    if not refits or not quiet:
        raise ValueError("no refit was seen receiving, or no window without one, so there is nothing to compare")
    arrivals = sorted(arrivals, key=lambda arrival: arrival.seconds)
    before = _rate(arrivals, quiet)
    receiving = _rate(arrivals, [refit.arriving for refit in refits])
    still = sorted(gap for window in quiet for gap in latencies(arrivals, *window))
    across = sorted(gap for refit in refits for gap in latencies(arrivals, refit.began, refit.ended + AFTER_SECONDS))
    return Serving(
        before_tokens_per_second=before,
        receiving_tokens_per_second=receiving,
        kept_percent=100 * receiving / before,
        before_p50=percentile(still, 50),
        before_p99=percentile(still, 99),
        across_p50=percentile(across, 50),
        across_p99=percentile(across, 99),
        across_longest=across[-1],
        refused=sum(refusals(arrivals, refit.began, refit.ended + AFTER_SECONDS) for refit in refits),
    )


def _rate(arrivals: Sequence[Arrival], windows: Sequence[Window]) -> float:
    tokens = sum(tokens_per_second(arrivals, *window) * (window[1] - window[0]) for window in windows)
    return tokens / sum(end - begin for begin, end in windows)
