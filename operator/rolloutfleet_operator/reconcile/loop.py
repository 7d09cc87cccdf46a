"""The level-triggered loop of one fleet. The one place where any exception is caught: it is logged with its stack and reported."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from rolloutfleet_operator.errors import OperatorError, TransientError
from rolloutfleet_operator.plan.observed import Observed
from rolloutfleet_operator.reconcile.fleetpass import PassResult, report_fault, run_pass
from rolloutfleet_operator.reconcile.runtime import FleetKey, Runtime
from rolloutfleet_operator.reconcile.taxonomy import requeue_after
from rolloutfleet_operator.reconcile.waiting import Stopper, sleep_until_woken, unless_stopped
from rolloutfleet_operator.status.conditions import Event

log = logging.getLogger(__name__)

TICK_GRACE_SECONDS = 60.0
"""How late a loop may be before the liveness probe fails."""

Emit = Callable[[Mapping[str, Any], Event], None]


async def drive_fleet(
    runtime: Runtime, key: FleetKey, observe: Callable[[], Observed], emit: Emit, stopped: Stopper
) -> None:
    """Runs passes over one fleet until told to stop: when something it knows changes, when a pass asks for it, and now and then."""
    config = runtime.config
    flag = runtime.wakes.open(key)
    failures = 0
    try:
        while not stopped:
            flag.clear()
            runtime.ticks.beat(key, config.pass_deadline_seconds + TICK_GRACE_SECONDS)
            result = await unless_stopped(stopped, _measured_pass(runtime, key, observe, failures))
            if result is None or result.gone:
                runtime.metrics.forget_fleet(key)
                await _until_stopped(runtime, key, flag, stopped)
                continue
            failures = failures + 1 if result.error is not None else 0
            if result.body is not None:
                for event in result.events:
                    emit(result.body, event)
            delay = _delay(runtime, result, failures)
            runtime.ticks.beat(key, delay + TICK_GRACE_SECONDS)
            await sleep_until_woken(stopped, flag, delay)
            await unless_stopped(stopped, asyncio.sleep(config.settle_seconds))
    finally:
        runtime.wakes.close(key, flag)
        runtime.ticks.drop(key)
        runtime.metrics.forget_fleet(key)


async def _measured_pass(runtime: Runtime, key: FleetKey, observe: Callable[[], Observed], failures: int) -> PassResult:
    began = runtime.monotonic()
    result = await _guarded_pass(runtime, key, observe, failures)
    error = result.error
    reason = "" if error is None else error.reason if isinstance(error, OperatorError) else type(error).__name__
    runtime.metrics.note_pass(runtime.monotonic() - began, reason, wrote=result.wrote_status)
    if result.ready:
        runtime.metrics.note_fleet(key, result.ready)
    return result


async def _until_stopped(runtime: Runtime, key: FleetKey, flag: asyncio.Event, stopped: Stopper) -> None:
    """The fleet is gone or going, and the order to stop is on its way; should it not come, the loop looks again."""
    runtime.ticks.beat(key, runtime.config.resync_seconds + TICK_GRACE_SECONDS)
    if not stopped:
        await sleep_until_woken(stopped, flag, runtime.config.resync_seconds)


async def _guarded_pass(runtime: Runtime, key: FleetKey, observe: Callable[[], Observed], failures: int) -> PassResult:
    fields = {"namespace": key[0], "fleet": key[1]}
    try:
        async with asyncio.timeout(runtime.config.pass_deadline_seconds):
            result = await run_pass(runtime, key, observe, failures)
    except TimeoutError:
        return await _report(
            runtime,
            key,
            TransientError(f"the pass took longer than {runtime.config.pass_deadline_seconds:.0f} s"),
            fields,
        )
    except OperatorError as error:
        log.warning(
            "pass could not be finished", extra={"fields": fields | {"reason": error.reason, "error": error.message}}
        )
        return PassResult(error=error)
    except Exception as error:  # a fault of ours must not end the care for the fleet
        log.exception("pass ended with a fault", extra={"fields": fields})
        return await _report(runtime, key, error, fields)
    if isinstance(result.error, OperatorError):
        details = {"reason": result.error.reason, "error": result.error.message}
        log.warning("pass ended with an error", extra={"fields": fields | details})
    if result.wrote_status:
        log.info("status changed", extra={"fields": fields})
    return result


async def _report(runtime: Runtime, key: FleetKey, error: Exception, fields: dict[str, str]) -> PassResult:
    message = error.message if isinstance(error, OperatorError) else f"{type(error).__name__}: {error}"
    try:
        return await report_fault(runtime, key, error, message)
    except OperatorError as second:
        log.warning("fault could not be reported", extra={"fields": fields | {"error": second.message}})
        return PassResult(error=error)


def _delay(runtime: Runtime, result: PassResult, failures: int) -> float:
    waits = [runtime.config.resync_seconds * (0.9 + 0.2 * runtime.jitter())]
    if result.retry_after is not None:
        waits.append(result.retry_after)
    if result.error is not None:
        after = requeue_after(result.error, failures, runtime.jitter())
        waits += [after] if after is not None else []
    return min(waits)
