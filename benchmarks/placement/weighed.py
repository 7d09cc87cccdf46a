"""A plan in the numbers that the optimum is given in."""

from dataclasses import dataclass

from benchmarks.placement.instances import Case
from rolloutfleet_operator.plan.placement.result import Verdict
from rolloutfleet_operator.plan.placement.solve import Limits, plan_placement


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a plan came to."""

    engines: int
    pods: int
    whole: int
    certain: bool
    """Whether the plan says that no more engines fit, or none is missing."""


def weigh(case: Case, limits: Limits | None = None) -> Weighed:
    """The planner's answer to a case, within its own limits unless others are given."""
    plan = plan_placement(case.nodes, case.requests, limits=limits or Limits())
    places = [place for fleet in plan.fleets for place in fleet.engines]
    return Weighed(
        engines=len(places),
        pods=sum(len(place.nodes) for place in places),
        whole=plan.score.whole_after,
        certain=all(fleet.verdict is not Verdict.NOT_FOUND for fleet in plan.fleets),
    )
