"""A fleet's checkpoint in one pass: what is decided about it, and the step that carries that out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rolloutfleet_operator.api.conditions import Condition, FleetCondition, Reason
from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.weightsync import WeightSyncStatus
from rolloutfleet_operator.cluster.gateway import Gateway
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.config import Images
from rolloutfleet_operator.errors import NotFoundError
from rolloutfleet_operator.naming import ROLE_CHECKPOINT, SYNC_KIND
from rolloutfleet_operator.plan.checkpoint import CheckpointFacts, CheckpointPlan, RenderedJob, plan_checkpoint
from rolloutfleet_operator.plan.observed import Observed, Pod, WeightSync
from rolloutfleet_operator.reconcile.ownership import create_owned
from rolloutfleet_operator.render.checkpoint import (
    CheckpointJob,
    render_checkpoint_job,
    render_checkpoint_weightsync,
)
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.status.checkpoint import judge_stranger, render_sending_status, summarize_sending
from rolloutfleet_operator.status.weightsync import active_condition, render_active_status


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """What is decided about a fleet's checkpoint."""

    plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    refit: CheckpointJob | None = None
    """The Job that sends it, None without a checkpoint."""
    repair: CheckpointJob | None = None
    weightsync: Manifest | None = None
    syncs: tuple[WeightSync, ...] = ()
    """The fleet's own WeightSyncs of checkpoints."""
    strangers: tuple[WeightSync, ...] = ()
    """Those that somebody else has made."""
    report: WeightSyncStatus | None = None
    """The sync job's."""


def view_checkpoint(
    fleet: FleetIdentity,
    spec: RolloutFleetSpec,
    observed: Observed,
    images: Images,
    current: Iterable[Pod],
    committed: int,
    report: WeightSyncStatus | None,
    conditions: Iterable[Condition],
    now: datetime,
) -> CheckpointView:
    """What one pass decides about the checkpoint.

    Args:
        fleet: whose it is.
        spec: what the fleet should be.
        observed: what the watches know.
        images: for fleets that name none.
        current: the pods that count for the engines.
        committed: the fleet's version.
        report: the sync job's, None before its first.
        conditions: of the fleet, as last written.
        now: for how long engines have been behind.
    """
    checkpoint = spec.weights.checkpoint
    behind = (c for c in conditions if c.type == FleetCondition.WEIGHTS_CURRENT and c.reason == Reason.ENGINES_BEHIND)
    facts = CheckpointFacts(
        version=checkpoint.version if checkpoint is not None else None,
        late_join=spec.refit.late_join,
        min_ready=spec.refit.min_ready,
        engines=spec.engines,
        up=sum(pod.container.up for pod in current if pod.live),
        sync_ready=any(pod.ready and pod.live for pod in observed.sync_pods()),
        committed=committed,
        report=report,
        behind_since=next(
            (datetime.fromisoformat(c.last_transition_time) for c in behind if c.status == "False"), None
        ),
        now=now,
    )
    refit = repair = weightsync = None
    if checkpoint is not None:
        refit = render_checkpoint_job(fleet, spec, checkpoint, images)
        repair = render_checkpoint_job(fleet, spec, checkpoint, images, repair=True)
        weightsync = render_checkpoint_weightsync(fleet, checkpoint)
    sending = [sync for sync in observed.weightsyncs if sync.checkpoint is not None]
    syncs = tuple(sync for sync in sending if sync.owner_uid == fleet.uid)
    jobs = tuple(job for job in observed.jobs_of(ROLE_CHECKPOINT) if job.owner_uid == fleet.uid)
    pods = tuple(pod for pod in observed.pods if pod.role == ROLE_CHECKPOINT)
    plan = plan_checkpoint(facts, _known(refit), _known(repair), jobs, pods, syncs)
    strangers = tuple(sync for sync in sending if sync.owner_uid != fleet.uid and not sync.terminating)
    return CheckpointView(plan, refit, repair, weightsync, syncs, strangers, report)


def _known(job: CheckpointJob | None) -> RenderedJob | None:
    return None if job is None else RenderedJob(job.name, job.revision)


async def apply_checkpoint(gateway: Gateway, fleet: FleetIdentity, view: CheckpointView, now: datetime) -> None:
    """Jobs and WeightSync of the checkpoint are as planned, and the WeightSync says how it stands.

    The WeightSync comes before its Job, and says so before the Job is made: what it says outlives the Job.

    Raises:
        OperatorError: an object could not be read or written, or is not the fleet's.
    """
    plan = view.plan
    for job in (*plan.delete_jobs, *plan.refit.delete, *plan.repair.delete):
        await _delete(gateway, ObjectRef("Job", fleet.namespace, job.name), job.uid)
    for sync in plan.delete_syncs:
        await _delete(gateway, ObjectRef(SYNC_KIND, fleet.namespace, sync.name), sync.uid)
    for sync in view.strangers:
        condition = active_condition(sync, judge_stranger(fleet.name), now)
        if condition is not None:
            await _say(gateway, render_active_status(sync.name, fleet.namespace, condition))
    if not plan.keep_sync or view.weightsync is None or view.refit is None or view.repair is None:
        return
    name = view.weightsync["metadata"]["name"]
    stored = next((sync for sync in view.syncs if sync.name == name), None)
    if stored is None:
        await create_owned(gateway, fleet, view.weightsync)
        return  # the pass that its event begins goes on from here
    refit, repair = (RenderedJob(job.name, job.revision) for job in (view.refit, view.repair))
    status = summarize_sending(stored, plan, refit, repair, view.report, now)
    if status is not None:
        await _say(gateway, render_sending_status(name, fleet.namespace, status))
    if plan.refit.create:
        await create_owned(gateway, fleet, view.refit.manifest)
    if plan.repair.create:
        await create_owned(gateway, fleet, view.repair.manifest)


async def _say(gateway: Gateway, manifest: Mapping[str, Any]) -> None:
    try:
        await gateway.apply(manifest, force=True, subresource="status")
    except NotFoundError:
        return  # it went since the watches told of it


async def _delete(gateway: Gateway, ref: ObjectRef, uid: str) -> None:
    try:
        await gateway.delete(ref, uid)
    except NotFoundError:
        return
