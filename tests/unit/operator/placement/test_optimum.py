"""The planner beside CP-SAT on small random clusters: what fits is placed, in the fewest pods, with as many GPUs in whole domains."""

import pytest
from benchmarks.placement.exact import solve_exactly
from benchmarks.placement.instances import make_case
from benchmarks.placement.weighed import weigh

from rolloutfleet_operator.plan.placement.solve import Limits

SEEDS = range(1000, 1040)
"""The benchmark takes 500 others."""


@pytest.mark.parametrize("seed", SEEDS)
def test_what_fits_is_placed_and_nothing_better_exists(seed):
    case = make_case(seed)
    best, ours = solve_exactly(case, seconds=20), weigh(case)
    if best.proved:
        assert ours.engines == best.engines
        assert (ours.pods, ours.whole) == (best.pods, best.whole)
    else:
        assert ours.engines >= best.engines


def test_greedy_alone_never_calls_impossible_what_fits():
    for seed in SEEDS:
        case = make_case(seed)
        ours, exact = weigh(case, Limits(exact_nodes=0)), weigh(case)
        assert ours.engines == exact.engines or not ours.certain
