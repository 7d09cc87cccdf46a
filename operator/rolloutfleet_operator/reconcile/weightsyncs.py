"""The loop of one WeightSync. Its fleet's pass does the work; this one speaks up when there is no such fleet, and keeps the object
from vanishing before the fleet has taken over its epoch and version."""

import asyncio
import logging
from collections.abc import Callable

from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import NotFoundError, OperatorError
from rolloutfleet_operator.plan.observed import FleetBrief, WeightSync
from rolloutfleet_operator.reconcile.loop import TICK_GRACE_SECONDS
from rolloutfleet_operator.reconcile.runtime import Runtime
from rolloutfleet_operator.reconcile.waiting import Stopper, sleep_until_woken
from rolloutfleet_operator.status.weightsync import active_condition, judge_fleetless, render_active_status

log = logging.getLogger(__name__)

HANDOVER_SECONDS = 10.0
"""How long a deleted WeightSync waits for its fleet to take its version over."""
RETRY_SECONDS = 15.0


def sync_wake_key(namespace: str, fleet: str) -> tuple[str, str, str]:
    """The key under which WeightSyncs of a fleet are woken when the fleet comes, goes, or changes its weights."""
    return ("weightsyncs", namespace, fleet)


async def drive_weightsync(
    runtime: Runtime,
    ref: ObjectRef,
    fleet: str,
    look: Callable[[], tuple[WeightSync, FleetBrief | None]],
    stopped: Stopper,
) -> None:
    """Runs until told to stop; ``look`` gives the object and its fleet as the watches know them."""
    key = sync_wake_key(ref.namespace, fleet)
    flag = runtime.wakes.open(key)
    try:
        while not stopped:
            flag.clear()
            sync, brief = look()
            delay = runtime.config.resync_seconds
            if brief is None and not sync.terminating:
                delay = await _say_fleetless(runtime, ref, fleet, sync, delay)
            runtime.ticks.beat(ref, delay + TICK_GRACE_SECONDS)
            await sleep_until_woken(stopped, flag, delay)
    finally:
        runtime.ticks.drop(ref)


async def hand_over(
    runtime: Runtime, namespace: str, fleet: str, look: Callable[[], tuple[WeightSync, FleetBrief | None]]
) -> None:
    """Returns once the fleet's status holds the deleted WeightSync's epoch and version, or the fleet is gone.

    Raises:
        TimeoutError: neither came true in time.
    """
    key = sync_wake_key(namespace, fleet)
    flag = runtime.wakes.open(key)
    try:
        async with asyncio.timeout(HANDOVER_SECONDS):
            while not _taken_over(*look()):
                await flag.wait()
                flag.clear()
    finally:
        runtime.wakes.close(key, flag)


def _taken_over(sync: WeightSync, fleet: FleetBrief | None) -> bool:
    if fleet is None or fleet.terminating:
        return True
    return fleet.epoch >= int(sync.status.get("epoch", 0)) and fleet.version >= int(sync.status.get("version", 0))


async def _say_fleetless(runtime: Runtime, ref: ObjectRef, fleet: str, sync: WeightSync, delay: float) -> float:
    """Seconds until the next look."""
    condition = active_condition(sync, judge_fleetless(fleet, ref.namespace), runtime.now())
    if condition is None:
        return delay
    try:
        await runtime.gateway.apply(
            render_active_status(ref.name, ref.namespace, condition), force=True, subresource="status"
        )
    except NotFoundError:
        return delay
    except OperatorError as error:
        log.warning("status could not be written", extra={"fields": {"object": str(ref), "error": error.message}})
        return min(RETRY_SECONDS, delay)
    return delay
