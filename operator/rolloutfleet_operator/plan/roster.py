"""The fleet's members, as the sync job is told."""

from collections.abc import Sequence

from rolloutfleet.contract.members import Member, Roster
from rolloutfleet_operator.plan.engines import EngineGoal, current_pods
from rolloutfleet_operator.plan.observed import Pod


def plan_roster(fleet: str, fleet_uid: str, goal: EngineGoal, own: Sequence[Pod]) -> Roster:
    """One live pod per engine, of whatever revision, by engine; a pod without an address is listed and not reachable yet."""
    members = tuple(
        Member(engine=engine, pod_name=pod.name, pod_uid=pod.uid, address=pod.address, ranks=pod.ranks)
        for engine, pod in sorted(current_pods(own, goal.revision).items())
        if engine < goal.engines
    )
    return Roster(fleet=fleet, fleet_uid=fleet_uid, engines=goal.engines, members=members)
