"""``python3 -m rolloutfleet_sync``: the sync job's process."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from aiohttp import web
from pydantic import ValidationError

from rolloutfleet_sync.files import FileRoster, FileStatus
from rolloutfleet_sync.log import configure_logging, logger
from rolloutfleet_sync.protocol.model import Identity, Timing, initial_state
from rolloutfleet_sync.runtime import Runtime
from rolloutfleet_sync.server import build_app
from rolloutfleet_sync.settings import Settings, SettingsError, read_settings
from rolloutfleet_sync.store import RosterSource, StatusStore, StoreConflictError
from rolloutfleet_sync.workers import WorkerCaller


async def serve(settings: Settings) -> None:
    """Work for the fleet until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        rosters, store = await _connect(settings, stack)
        identity = Identity(settings.fleet, settings.namespace, settings.fleet_uid, settings.model)
        state = initial_state(identity, settings.policy, Timing(lease=settings.lease_seconds))
        runtime = Runtime(state, store, rosters, WorkerCaller(settings.token, settings.worker_port))
        runner = web.AppRunner(build_app(runtime, settings.token), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        logger.info("listening", extra={"addresses": runner.addresses})
        await runtime.run(stop)
        logger.info("stopped")


async def _connect(settings: Settings, stack: AsyncExitStack) -> tuple[RosterSource, StatusStore]:
    """Where roster and status come from; Kubernetes is imported only where one of them is kept there."""
    if settings.roster is not None and settings.status is not None:
        return FileRoster(settings.roster), FileStatus(settings.status)
    from rolloutfleet_sync import cluster

    api = await cluster.Api.connect()
    stack.push_async_callback(api.close)
    rosters: RosterSource = cluster.ConfigMapRoster(api, settings.namespace, f"{settings.fleet}-members")
    store: StatusStore = cluster.WeightSyncStatus(api, settings.namespace, settings.weightsync)
    if settings.roster is not None:
        rosters = FileRoster(settings.roster)
    if settings.status is not None:
        store = FileStatus(settings.status)
    return rosters, store


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's exit status: 0 after a signal, 1 when another sync job is at work, 2 for wrong settings."""
    try:
        settings = read_settings(arguments)
    except (SettingsError, ValidationError, OSError) as error:
        sys.stderr.write(f"rolloutfleet_sync: {error}\n")
        return 2
    configure_logging(settings.fleet, settings.log_level)
    try:
        asyncio.run(serve(settings))
    except StoreConflictError as error:
        logger.error("stopped for another sync job", extra={"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
