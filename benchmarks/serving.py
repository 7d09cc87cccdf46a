"""What a refit costs those who generate: tokens per second while weights arrive, and time between tokens across it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.load import Arrival, latencies, percentile, refusals, tokens_per_second
from benchmarks.refits import Measured
from rolloutfleet.contract.trainer import Phase

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


def summarize(arrivals: Sequence[Arrival], quiet: tuple[float, float], refits: Sequence[Measured]) -> Serving:
    """Serving in a window without refits beside serving while these refits received, and across them whole.

    All receiving windows count as one, by their length. Raises ValueError when there was none.
    """
    windows = [refit.window(Phase.TRANSFERRING) for refit in refits]
    length = sum(end - begin for begin, end in windows)
    if length <= 0:
        raise ValueError("no refit was seen receiving, so there is nothing to compare")
    received = sum(tokens_per_second(arrivals, *window) * (window[1] - window[0]) for window in windows)
    before = tokens_per_second(arrivals, *quiet)
    still = latencies(arrivals, *quiet)
    across = sorted(gap for refit in refits for gap in latencies(arrivals, refit.began, refit.ended + AFTER_SECONDS))
    return Serving(
        before_tokens_per_second=before,
        receiving_tokens_per_second=received / length,
        kept_percent=100 * received / length / before,
        before_p50=percentile(still, 50),
        before_p99=percentile(still, 99),
        across_p50=percentile(across, 50),
        across_p99=percentile(across, 99),
        across_longest=across[-1],
        refused=sum(refusals(arrivals, refit.began, refit.ended + AFTER_SECONDS) for refit in refits),
    )
