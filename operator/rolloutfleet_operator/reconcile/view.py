"""One fleet as a pass sees it: loaded, observed, planned and rendered, before anything is applied. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.fleetstatus import RolloutFleetStatus, Weights
from rolloutfleet_operator.api.parse import parse_fleet_spec, parse_weightsync_status
from rolloutfleet_operator.api.recovery import RecoveryStatus
from rolloutfleet_operator.config import Images
from rolloutfleet_operator.naming import ROLE_SYNC
from rolloutfleet_operator.plan.engines import EngineGoal, EnginePlan, current_pods, plan_engines
from rolloutfleet_operator.plan.fabric import plan_fabric
from rolloutfleet_operator.plan.fit import Fit, plan_fit
from rolloutfleet_operator.plan.gather import gather_engines
from rolloutfleet_operator.plan.leaving import mark_leaving
from rolloutfleet_operator.plan.observe import revive_of
from rolloutfleet_operator.plan.observed import Observed, Pod, WeightSync
from rolloutfleet_operator.plan.recovery import RecoveryGoal, due_in, plan_recovery
from rolloutfleet_operator.plan.roster import plan_roster
from rolloutfleet_operator.plan.sync import JobPlan, plan_active, plan_sync_job
from rolloutfleet_operator.reconcile.checkpoint import CheckpointView, view_checkpoint
from rolloutfleet_operator.render.engine import EngineTemplate, render_engine_template
from rolloutfleet_operator.render.fabric import render_compute_domain
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.render.shared import render_members, render_services
from rolloutfleet_operator.render.sync import SyncJob, render_sync_access, render_sync_job
from rolloutfleet_operator.status.fleet import FleetFacts
from rolloutfleet_operator.status.weights import fold_weights


@dataclass(frozen=True, slots=True)
class FleetView:
    """What one pass has found out and decided."""

    fleet: FleetIdentity
    generation: int
    spec: RolloutFleetSpec
    observed: Observed
    template: EngineTemplate
    goal: EngineGoal
    fit: Fit
    own: tuple[Pod, ...]
    """One for each engine and incarnation."""
    engines: EnginePlan
    active: WeightSync | None
    job: SyncJob | None
    """The sync Job that should run, None when none should."""
    jobs: JobPlan
    compute_domain: Manifest | None
    """What has to be there before engine pods can get a channel of it."""
    shared: tuple[Manifest, ...]
    """Objects that are applied and kept as rendered."""
    weights: Weights
    reported: bool
    recovery: RecoveryStatus
    checkpoint: CheckpointView
    retry_after: float | None
    """When the next pass is due although nothing will have changed, in seconds."""

    def facts(self) -> FleetFacts:
        """What the status is made from."""
        current = current_pods(self.own, self.goal.revision)
        return FleetFacts(
            fleet=self.fleet,
            generation=self.generation,
            spec=self.spec,
            goal=self.goal,
            current=current,
            dead=[p for p in self.own if p.dead and p.engine < self.goal.engines and p.engine not in current],
            fit=self.fit,
            sync_pods=self.observed.sync_pods(),
            sync_waits=self.jobs.waiting_for,
            weights=self.weights,
            reported=self.reported,
            recovery=self.recovery,
            checkpoint=self.checkpoint.plan,
        )


def identify(body: Mapping[str, Any]) -> FleetIdentity:
    """Who the fleet is."""
    metadata = body["metadata"]
    return FleetIdentity(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])


def view_fleet(
    body: Mapping[str, Any], previous: RolloutFleetStatus, observed: Observed, images: Images, now: datetime
) -> FleetView:
    """Everything that one pass decides.

    Args:
        body: the fleet as stored now.
        previous: its status, parsed.
        observed: what the watches know.
        images: for fleets that name none.
        now: for delays.

    Raises:
        InvalidSpecError: the fleet, or a WeightSync's status, cannot be read.
    """
    spec, fleet = parse_fleet_spec(body), identify(body)
    template = render_engine_template(fleet, spec, images)
    gpus, resource = spec.parallelism.ranks_per_pod, spec.placement.gpu_resource
    fit = plan_fit(gpus, spec.parallelism.pods, resource, observed.nodes)
    if fit.fits is not False:
        fit = plan_fabric(spec.fabric.rdma, spec.fabric.rdma_devices, resource, gpus, observed.nodes) or fit
    pods = mark_leaving(observed.engine_pods(fleet.uid), observed.nodes, spec.recovery.leaving_taints)
    own = gather_engines(pods)
    recovery = plan_recovery(
        RecoveryGoal(spec.recovery, spec.engines, template.revision, revive_of(body)),
        previous.recovery or RecoveryStatus(),
        own,
        now,
    )
    goal = EngineGoal(
        engines=spec.engines,
        revision=template.revision,
        may_disrupt=fit.fits is not False,
        retired=frozenset(recovery.retired),
        avoided=frozenset(node.node for node in recovery.quarantined_nodes),
        backoff_cap_seconds=spec.recovery.backoff_cap_seconds,
    )
    engines = plan_engines(goal, own, observed.foreign_engine_pods(fleet.uid), now)
    active = plan_active(observed.weightsyncs)
    job = None if active is None or spec.suspend else render_sync_job(fleet, spec, active.name, images)
    reports = {sync.uid: parse_weightsync_status({"status": sync.status}) for sync in observed.weightsyncs}
    report = reports.get(active.uid) if active is not None else None
    weights = fold_weights(previous.weights, reports.values(), report)
    current = current_pods(own, goal.revision).values()
    checkpoint = view_checkpoint(
        fleet, spec, observed, images, current, weights.version, report, previous.conditions, now
    )
    shared = [*render_services(fleet), render_members(fleet, plan_roster(fleet.name, fleet.uid, goal, own))]
    if active is not None:
        shared += render_sync_access(fleet, active.name)
    return FleetView(
        fleet=fleet,
        generation=body["metadata"]["generation"],
        spec=spec,
        observed=observed,
        template=template,
        goal=goal,
        fit=fit,
        own=own,
        engines=engines,
        active=active,
        job=job,
        jobs=plan_sync_job(job.name if job else "", fleet.uid, observed.jobs_of(ROLE_SYNC), observed.sync_pods()),
        compute_domain=render_compute_domain(fleet, spec.fabric),
        shared=tuple(shared),
        weights=weights,
        reported=report is not None and report.members is not None,
        recovery=recovery,
        checkpoint=checkpoint,
        retry_after=min(
            (
                after
                for after in (engines.retry_after, due_in(recovery, now), checkpoint.plan.retry_after)
                if after is not None
            ),
            default=None,
        ),
    )
