"""One pass over one fleet: load, view, steps, summary, at most one status write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutfleet_operator import naming
from rolloutfleet_operator.api.conditions import FleetCondition
from rolloutfleet_operator.api.fleetstatus import RolloutFleetStatus
from rolloutfleet_operator.api.parse import parse_fleet_status
from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import NotFoundError, OperatorError
from rolloutfleet_operator.plan.observed import Observed
from rolloutfleet_operator.reconcile.runtime import FleetKey, Runtime
from rolloutfleet_operator.reconcile.steps import run_steps
from rolloutfleet_operator.reconcile.taxonomy import treatment_of
from rolloutfleet_operator.reconcile.view import FleetView, view_fleet
from rolloutfleet_operator.status.conditions import Event, condition_events
from rolloutfleet_operator.status.fleet import Fault, summarize_fault, summarize_fleet
from rolloutfleet_operator.status.recovery import recovery_events
from rolloutfleet_operator.status.weights import weights_events

OWN_CONDITIONS = frozenset(FleetCondition)


@dataclass(frozen=True, slots=True)
class PassResult:
    """How a pass ended. ``gone`` means that there is no fleet to look after any more."""

    body: Mapping[str, Any] | None = None
    error: Exception | None = None
    events: tuple[Event, ...] = ()
    retry_after: float | None = None
    wrote_status: bool = False
    ready: str = ""
    """What the condition Ready says after it."""
    gone: bool = False


async def run_pass(runtime: Runtime, key: FleetKey, observe: Callable[[], Observed], failures: int) -> PassResult:
    """The result of one pass.

    Args:
        runtime: the process.
        key: namespace and name of the fleet.
        observe: what the watches know, asked after the fleet was loaded.
        failures: passes that failed in a row before this one.

    Raises:
        OperatorError: the fleet could not be loaded, or its status not be written.
    """
    body = await load_fleet(runtime, key)
    if body is None:
        return PassResult(gone=True)
    previous = _own_conditions(parse_fleet_status(body))
    view, error = None, None
    try:
        view = view_fleet(body, previous, observe(), runtime.config.images, runtime.now())
        await run_steps(runtime, view)
    except OperatorError as raised:
        error = raised
    status = _summarize(runtime, body, view, previous, error, failures)
    events, wrote = await write_status(runtime, body, previous, status)
    return PassResult(
        body=body,
        error=error,
        events=events,
        retry_after=view.retry_after if view is not None else None,
        wrote_status=wrote,
        ready=ready_status(status),
    )


async def report_fault(runtime: Runtime, key: FleetKey, error: Exception, message: str) -> PassResult:
    """The result after a fault of the operator itself was written to the fleet's conditions.

    Raises:
        OperatorError: the fleet could not be loaded, or its status not be written.
    """
    body = await load_fleet(runtime, key)
    if body is None:
        return PassResult(gone=True)
    previous = _own_conditions(parse_fleet_status(body))
    treatment = treatment_of(error)
    if treatment.reason is None:
        return PassResult(body=body, error=error)
    fault = Fault(treatment.reason, message, treatment.stalled)
    status = summarize_fault(previous, previous, fault, body["metadata"]["generation"], runtime.now())
    events, wrote = await write_status(runtime, body, previous, status)
    return PassResult(body=body, error=error, events=events, wrote_status=wrote, ready=ready_status(status))


def ready_status(status: RolloutFleetStatus) -> str:
    """The status of the condition Ready, Unknown while there is none."""
    return next((c.status for c in status.conditions if c.type == FleetCondition.READY), "Unknown")


async def load_fleet(runtime: Runtime, key: FleetKey) -> Mapping[str, Any] | None:
    """The fleet as stored now, None when it is gone or going."""
    try:
        body = await runtime.gateway.get(ObjectRef(naming.FLEET_KIND, *key))
    except NotFoundError:
        return None
    return None if "deletionTimestamp" in body["metadata"] else body


async def write_status(
    runtime: Runtime, body: Mapping[str, Any], previous: RolloutFleetStatus, status: RolloutFleetStatus
) -> tuple[tuple[Event, ...], bool]:
    """The events to tell, and whether anything was written: nothing is when the status already says so."""
    if status == previous:
        return (), False
    metadata = body["metadata"]
    manifest = {
        "apiVersion": naming.API_VERSION,
        "kind": naming.FLEET_KIND,
        # The UID keeps a late write away from a new fleet of the same name.
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
        "status": status.body(),
    }
    await runtime.gateway.apply(manifest, force=True, subresource="status")
    events = condition_events(previous.conditions, status.conditions)
    if status.weights is not None:
        events += weights_events(previous.weights, status.weights)
    events += recovery_events(previous.recovery, status.recovery)
    return events, True


def _summarize(
    runtime: Runtime,
    body: Mapping[str, Any],
    view: FleetView | None,
    previous: RolloutFleetStatus,
    error: OperatorError | None,
    failures: int,
) -> RolloutFleetStatus:
    now = runtime.now()
    base = summarize_fleet(view.facts(), previous, now) if view is not None else previous
    if error is None:
        return base
    treatment = treatment_of(error)
    if treatment.reason is None or failures + 1 < treatment.report_after:
        return base
    fault = Fault(treatment.reason, error.message, treatment.stalled)
    return summarize_fault(base, previous, fault, body["metadata"]["generation"], now)


def _own_conditions(status: RolloutFleetStatus) -> RolloutFleetStatus:
    """The status without conditions of other writers, which are neither compared nor written."""
    own = (condition for condition in status.conditions if condition.type in OWN_CONDITIONS)
    return status.model_copy(update={"conditions": tuple(sorted(own, key=lambda condition: condition.type))})
