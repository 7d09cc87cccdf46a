"""The operator's word about a WeightSync: whether it is its turn."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rolloutfleet_operator import naming
from rolloutfleet_operator.api.conditions import Condition, Reason, SyncCondition
from rolloutfleet_operator.plan.observed import WeightSync
from rolloutfleet_operator.status.conditions import Verdict, fold_conditions


def judge_turn(sync: WeightSync, active: WeightSync | None, fleet: str) -> Verdict:
    """Whether the fleet's sync job works for ``sync``; one that waits is told for whom."""
    if active is None or sync.uid == active.uid:
        return Verdict(
            SyncCondition.ACTIVE, "True", Reason.SERVING_FLEET, f"the sync job of fleet {fleet} works for this object"
        )
    message = f"WeightSync {active.name} of fleet {fleet} is older and active; delete it to let this one work"
    return Verdict(SyncCondition.ACTIVE, "False", Reason.WAITING_FOR_TURN, message)


def judge_fleetless(fleet: str, namespace: str) -> Verdict:
    """The verdict on a WeightSync whose fleet is not there."""
    message = f"fleetRef.name is {fleet} but namespace {namespace} has no RolloutFleet of that name"
    return Verdict(SyncCondition.ACTIVE, "False", Reason.FLEET_NOT_FOUND, message)


def active_condition(sync: WeightSync, verdict: Verdict, now: datetime) -> Condition | None:
    """The condition to write, None when the object says it already."""
    stored = [c for c in sync.status.get("conditions") or () if c.get("type") == SyncCondition.ACTIVE]
    previous = [Condition.model_validate(condition) for condition in stored]
    (wanted,) = fold_conditions(previous, [verdict], sync.generation, now)
    return None if previous == [wanted] else wanted


def render_active_status(name: str, namespace: str, condition: Condition) -> Mapping[str, Any]:
    """What the operator applies to a WeightSync's status: its own condition alone."""
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.SYNC_KIND,
        "metadata": {"name": name, "namespace": namespace},
        "status": {"conditions": [condition.body()]},
    }
