"""What is told of a checkpoint: in its WeightSync, and in the fleet's conditions."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rolloutfleet_operator import naming
from rolloutfleet_operator.api.conditions import Condition, FleetCondition, Reason, SyncCondition
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_operator.plan.checkpoint import CheckpointPlan, JobStep, RenderedJob, Stage
from rolloutfleet_operator.plan.observed import WeightSync
from rolloutfleet_operator.status.conditions import Verdict, fold_conditions

_PHASES = {Stage.WAITING: "Pending", Stage.COMPLETE: "Complete", Stage.FAILED: "Failed"}


def judge_checkpoint(step: JobStep) -> Verdict | None:
    """WeightsCurrent while a checkpoint is on its way or could not be sent; None when it has nothing to say."""
    kind = FleetCondition.WEIGHTS_CURRENT
    if step.stage in {Stage.WAITING, Stage.RUNNING}:
        return Verdict(kind, "False", Reason.CHECKPOINT_REFIT, step.message)
    if step.stage is Stage.FAILED:
        return Verdict(kind, "False", Reason.CHECKPOINT_FAILED, step.message)
    return None


def judge_sending(step: JobStep) -> Verdict:
    """The condition Active of the checkpoint's WeightSync."""
    kind = SyncCondition.ACTIVE
    match step.stage:
        case Stage.RUNNING:
            return Verdict(kind, "True", Reason.SERVING_FLEET, step.message)
        case Stage.WAITING:
            return Verdict(kind, "False", Reason.WAITING_FOR_TURN, step.message)
        case Stage.FAILED:
            return Verdict(kind, "False", Reason.CHECKPOINT_FAILED, step.message)
        case _:
            return Verdict(kind, "False", Reason.SENT, step.message)


def judge_stranger(fleet: str) -> Verdict:
    """The condition Active of a WeightSync with a checkpoint that is not the fleet's."""
    message = f"spec.weights.checkpoint of fleet {fleet} does not ask for this; set it there, and delete this object"
    return Verdict(SyncCondition.ACTIVE, "False", Reason.NOT_OF_FLEET, message)


def summarize_sending(
    sync: WeightSync,
    plan: CheckpointPlan,
    refit: RenderedJob,
    repair: RenderedJob,
    report: WeightSyncStatus | None,
    now: datetime,
) -> dict[str, Any] | None:
    """The status of the checkpoint's WeightSync, None when it says so already."""
    ours = report is not None and report.session is not None and report.session.trainer == refit.name
    status: dict[str, Any] = {
        "conditions": [_fold(sync, judge_sending(plan.refit), now).body()],
        "phase": _PHASES.get(plan.refit.stage, "Pending"),
    }
    if plan.refit.stage is Stage.RUNNING and ours and report is not None and report.refit is not None:
        status |= {"phase": report.refit.phase, "epoch": report.refit.epoch, "refit": report.refit.body()}
    if plan.refit.stage is Stage.COMPLETE and sync.checkpoint is not None:
        status["version"] = sync.checkpoint
    if report is not None and report.last_refit is not None and report.last_refit.version == sync.checkpoint:
        status["lastRefit"] = report.last_refit.body()
    elif sync.status.get("lastRefit"):
        status["lastRefit"] = sync.status["lastRefit"]
    for name, step, job in (("checkpoint", plan.refit, refit), ("repair", plan.repair, repair)):
        run = step.run(job)
        if run is not None:
            status[name] = run.body()
    said = {key: value for key, value in sync.status.items() if key in _OWN}
    return None if said == status else status


_OWN = frozenset({"conditions", "phase", "epoch", "version", "refit", "lastRefit", "checkpoint", "repair"})


def render_sending_status(name: str, namespace: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """What the operator applies to the status of a checkpoint's WeightSync, which nobody else writes."""
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.SYNC_KIND,
        "metadata": {"name": name, "namespace": namespace},
        "status": dict(status),
    }


def _fold(sync: WeightSync, verdict: Verdict, now: datetime) -> Condition:
    stored = [c for c in sync.status.get("conditions") or () if c.get("type") == SyncCondition.ACTIVE]
    previous = [Condition.model_validate(condition) for condition in stored]
    (condition,) = fold_conditions(previous, [verdict], sync.generation, now)
    return condition
