"""A plan in the numbers that the optimum is given in."""

from dataclasses import dataclass

from benchmarks.placement.instances import Case
from rolloutfleet_operator.plan.placement.result import Verdict
from rolloutfleet_operator.plan.placement.search import BUDGET
from rolloutfleet_operator.plan.placement.solve import plan_placement


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a plan came to."""

    engines: int
    pods: int
    whole: int
    certain: bool
    """Whether the plan says that no more engines fit, or none is missing."""


def weigh(case: Case, budget: int = BUDGET) -> Weighed:
    """The planner's answer to a case; a budget of 0 leaves its exact search out."""
    plan = plan_placement(case.nodes, case.requests, budget=budget)
    places = [place for fleet in plan.fleets for place in fleet.engines]
    return Weighed(
        engines=len(places),
        pods=sum(len(place.nodes) for place in places),
        whole=plan.score.whole_after,
        certain=all(fleet.verdict is not Verdict.NOT_FOUND for fleet in plan.fleets),
    )
