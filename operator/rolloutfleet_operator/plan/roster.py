"""The fleet's members, as the sync job is told."""

from collections.abc import Sequence

from rolloutfleet.contract.members import Member, Roster
from rolloutfleet_operator.plan.engines import EngineGoal, current_pods
from rolloutfleet_operator.plan.observed import Pod


def plan_roster(fleet: str, fleet_uid: str, goal: EngineGoal, own: Sequence[Pod]) -> Roster:
    """One live pod per engine that is not retired, of whatever revision, by engine; one without an address is not reachable yet."""
    members = tuple(
        Member(
            engine=engine,
            pod_name=pod.name,
            pod_uid=pod.uid,
            address=pod.address,
            ranks=pod.ranks,
            leaving=bool(pod.leaving),
        )
        for engine, pod in sorted(current_pods(own, goal.revision).items())
        if engine in goal.wanted
    )
    retired = tuple(sorted(goal.retired))
    return Roster(fleet=fleet, fleet_uid=fleet_uid, engines=len(goal.wanted), retired=retired, members=members)
