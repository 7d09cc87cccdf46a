"""Serving while weights arrive beside serving before."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="refits send torch tensors")

from benchmarks.load import Arrival
from benchmarks.refits import Measured
from benchmarks.serving import summarize

from rolloutfleet.contract.trainer import Phase

# Four streams of 100 tokens a second each; from 10 s to 12 s every fifth token is missing, and at 12 s all stand still for 0.3 s.
ARRIVALS = [
    Arrival(tick / 100, stream, 1)
    for tick in range(1500)
    for stream in range(4)
    if not (1000 <= tick < 1200 and tick % 5 == 0) and not 1200 <= tick < 1230
]


def refit(began: float, phases: dict[Phase, float], seconds: float) -> Measured:
    result: Any = SimpleNamespace()
    return Measured(result=result, seconds=seconds, began=began, wall=0.0, phases=phases)


@pytest.mark.parametrize("verifying", [10.0, 10.3, 11.9])
def test_what_is_kept_is_counted_up_to_the_commit_and_gaps_across_the_whole_refit(verifying: float):
    phases = {Phase.PENDING: 9.9, Phase.TRANSFERRING: 10.0, Phase.VERIFYING: verifying, Phase.COMMITTING: 12.0}
    serving = summarize(ARRIVALS, [(2.0, 4.0), (4.0, 6.0)], [refit(9.9, phases, 2.5)])
    assert serving.before_tokens_per_second == pytest.approx(400, rel=0.01)
    assert serving.kept_percent == pytest.approx(80, rel=0.01)
    assert serving.before_p99 == pytest.approx(0.01)
    assert serving.across_p50 == pytest.approx(0.01)
    assert serving.across_longest == pytest.approx(0.31)
    assert serving.refused == 0


def test_a_transfer_too_short_to_be_seen_counts_as_the_whole_refit():
    serving = summarize(ARRIVALS, [(2.0, 4.0), (4.0, 6.0)], [refit(7.0, {Phase.PENDING: 7.0}, 0.5)])
    assert serving.kept_percent == pytest.approx(100, rel=0.03)


def test_without_a_refit_there_is_nothing_to_compare():
    with pytest.raises(ValueError, match="nothing to compare"):
        summarize(ARRIVALS, [(2.0, 4.0), (4.0, 6.0)], [])
