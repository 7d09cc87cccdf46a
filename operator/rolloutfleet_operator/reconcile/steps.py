"""The steps of a pass that write, in order. Each brings one thing to what was planned; one that fails does not keep others from running."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable

from rolloutfleet.contract.names import TOKEN_KEY
from rolloutfleet_operator import naming
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import (
    AlreadyExistsError,
    BlockedError,
    NotFoundError,
    OperatorError,
    OwnershipConflictError,
)
from rolloutfleet_operator.plan.gather import every_pod
from rolloutfleet_operator.plan.observe import controller_uid
from rolloutfleet_operator.plan.observed import Pod
from rolloutfleet_operator.plan.sync import plan_floor
from rolloutfleet_operator.reconcile.checkpoint import apply_checkpoint
from rolloutfleet_operator.reconcile.ownership import create_owned, foreign, keep_applied
from rolloutfleet_operator.reconcile.runtime import Runtime
from rolloutfleet_operator.reconcile.taxonomy import gravest
from rolloutfleet_operator.reconcile.view import FleetView
from rolloutfleet_operator.render.engine import render_engine_pod, render_engine_pods
from rolloutfleet_operator.render.identity import FleetIdentity, Manifest
from rolloutfleet_operator.render.shared import render_token
from rolloutfleet_operator.render.sync import render_floor, render_standing_weightsync
from rolloutfleet_operator.status.weightsync import active_condition, judge_turn, render_active_status

TOKEN_BYTES = 32

Step = Callable[[Runtime, FleetView], Awaitable[None]]


async def apply_token(runtime: Runtime, view: FleetView) -> None:
    """The fleet has a bearer token; one that is there is never replaced, whoever made it."""
    ref = ObjectRef("Secret", view.fleet.namespace, naming.token_name(view.fleet.name))
    try:
        stored = await runtime.gateway.get(ref)
    except NotFoundError:
        stored = None
    if stored is not None and (stored.get("data") or {}).get(TOKEN_KEY):
        return
    manifest = render_token(view.fleet, secrets.token_urlsafe(TOKEN_BYTES))
    if stored is None:
        await create_owned(runtime.gateway, view.fleet, manifest)
    elif controller_uid(stored) == view.fleet.uid:
        await runtime.gateway.apply(manifest, force=True)
    else:
        raise foreign(view.fleet, ref, stored)


async def apply_shared(runtime: Runtime, view: FleetView) -> None:
    """Services, roster and the sync job's rights are as rendered, one after the other: a RoleBinding needs its Role."""
    errors: list[OperatorError] = []
    for manifest in view.shared:
        try:
            await keep_applied(runtime.gateway, view.fleet, manifest, view.observed)
        except OperatorError as error:
            errors.append(error)
    if errors:
        raise gravest(errors)


async def apply_weightsync(runtime: Runtime, view: FleetView) -> None:
    """The standing WeightSync exists, and starts from what the fleet has committed."""
    name = naming.standing_weightsync_name(view.fleet.name)
    if any(sync.name == name for sync in view.observed.weightsyncs):
        return
    manifest = render_standing_weightsync(view.fleet, view.weights.epoch, view.weights.version)
    try:
        await runtime.gateway.create(manifest)
    except AlreadyExistsError:
        stored = await runtime.gateway.get(ObjectRef.of(manifest))
        target = stored["spec"]["fleetRef"]["name"]
        if target != view.fleet.name:
            message = f"WeightSync {name} names fleet {target}, and fleet {view.fleet.name} needs that name; delete it"
            raise OwnershipConflictError(message) from None


async def apply_turns(runtime: Runtime, view: FleetView) -> None:
    """Every WeightSync that trainers are to use says whether it is its turn."""
    for sync in sorted(view.observed.weightsyncs, key=lambda s: s.name):
        if sync.terminating or sync.checkpoint is not None:
            continue
        condition = active_condition(sync, judge_turn(sync, view.active, view.fleet.name), runtime.now())
        if condition is not None:
            status = render_active_status(sync.name, view.fleet.namespace, condition)
            try:
                await runtime.gateway.apply(status, force=True, subresource="status")
            except NotFoundError:
                continue  # it went since the watches told of it


async def apply_sync_job(runtime: Runtime, view: FleetView) -> None:
    """One sync Job runs, of the current template, for the active WeightSync, which knows the fleet's epoch and version."""
    for job in view.jobs.delete:
        await _delete(runtime, ObjectRef("Job", view.fleet.namespace, job.name), job.uid)
    if not view.jobs.create or view.job is None or view.active is None:
        return
    floor = plan_floor(view.active, view.weights.epoch, view.weights.version)
    if floor is not None:
        await runtime.gateway.apply(render_floor(view.fleet, view.active.name, *floor), force=True)
    await create_owned(runtime.gateway, view.fleet, view.job.manifest)


async def apply_weights(runtime: Runtime, view: FleetView) -> None:
    """What is planned for the fleet's checkpoint is done, and told in its WeightSync."""
    await apply_checkpoint(runtime.gateway, view.fleet, view.checkpoint, runtime.now())


async def apply_compute_domain(runtime: Runtime, fleet: FleetIdentity, manifest: Manifest) -> None:
    """The ComputeDomain is there: without it engine pods would wait for their channels for ever.

    Raises:
        BlockedError: the cluster has no such kind.
    """
    try:
        await create_owned(runtime.gateway, fleet, manifest)
    except NotFoundError:
        kind = f"{naming.COMPUTE_DOMAIN_KIND} ({manifest['apiVersion']})"
        message = f"fabric.preset MultiNodeNVLink needs the kind {kind}, which this cluster does not have: install NVIDIA's DRA driver"
        raise BlockedError(f"{message}, or name a fabric.claimTemplate") from None


async def apply_engines(runtime: Runtime, view: FleetView) -> None:
    """Engine pods are ended and made as planned; one that serves is ended only when the server would take its successor."""
    plan = view.engines
    if (plan.create or plan.complete) and view.compute_domain is not None:
        await apply_compute_domain(runtime, view.fleet, view.compute_domain)
    engines = {
        engine: render_engine_pods(view.fleet, view.template, engine, number, view.goal.avoided)
        for engine, number in plan.create
    }
    serving = sorted(pod.engine for pod in plan.delete if pod.ready and pod.engine in engines)
    if serving:
        await runtime.gateway.create(engines[serving[0]][0], dry_run=True)
    pods = [pod for _, engine in sorted(engines.items()) for pod in engine]
    pods += [
        render_engine_pod(view.fleet, view.template, engine, number, view.goal.avoided, rank)
        for engine, number, rank in plan.complete
    ]
    ended = [part for pod in plan.delete for part in every_pod(pod) if not part.terminating]
    await _each(runtime, (_delete_pod(runtime, view, pod) for pod in ended))
    await _each(runtime, (create_owned(runtime.gateway, view.fleet, pod) for pod in pods))


# Turns before the standing WeightSync: one that is made anew must find the turn of another written down.
STEPS: tuple[Step, ...] = (
    apply_token,
    apply_shared,
    apply_turns,
    apply_weightsync,
    apply_sync_job,
    apply_engines,
    apply_weights,
)


async def run_steps(runtime: Runtime, view: FleetView) -> None:
    """Runs every step.

    Raises:
        OperatorError: the gravest of what the steps raised, after all have run.
    """
    errors: list[OperatorError] = []
    for step in STEPS:
        try:
            await step(runtime, view)
        except OperatorError as error:
            errors.append(error)
    if errors:
        raise gravest(errors)


async def _delete_pod(runtime: Runtime, view: FleetView, pod: Pod) -> None:
    await _delete(runtime, ObjectRef("Pod", view.fleet.namespace, pod.name), pod.uid)


async def _delete(runtime: Runtime, ref: ObjectRef, uid: str) -> None:
    try:
        await runtime.gateway.delete(ref, uid)
    except NotFoundError:
        return


async def _each(runtime: Runtime, jobs: Iterable[Awaitable[object]]) -> None:
    """Runs the jobs, a bounded number at once; after a failure none is begun, since a quota that refuses one refuses all."""
    queue = iter(jobs)
    errors: list[OperatorError] = []

    async def work() -> None:
        for job in queue:
            try:
                await job
            except OperatorError as error:
                errors.append(error)
            if errors:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(runtime.config.creation_concurrency):
            group.create_task(work())
    if errors:
        raise gravest(errors)
