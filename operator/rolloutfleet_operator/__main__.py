"""``python -m rolloutfleet_operator``: checks the cluster, takes the Lease, and runs the operator until either ends.

``python -m rolloutfleet_operator plan`` is another thing: it plans offline, and needs no cluster (:mod:`rolloutfleet_operator.offline`).
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import kopf

from rolloutfleet_operator.cluster.access import check_access, check_served
from rolloutfleet_operator.cluster.gateway import Gateway
from rolloutfleet_operator.cluster.lease import LeaseHolder, LeaseTerms
from rolloutfleet_operator.config import Config, Images
from rolloutfleet_operator.errors import LeaseLostError, OperatorError
from rolloutfleet_operator.handlers.health import HealthServer
from rolloutfleet_operator.handlers.registry import Handlers
from rolloutfleet_operator.handlers.settings import configure
from rolloutfleet_operator.logs import configure_logging
from rolloutfleet_operator.metrics import Metrics
from rolloutfleet_operator.offline import main as plan_offline
from rolloutfleet_operator.reconcile.runtime import Runtime
from rolloutfleet_operator.reconcile.ticks import Ticks
from rolloutfleet_operator.reconcile.wakes import Wakes

log = logging.getLogger("rolloutfleet_operator")

EXIT_SETUP = 1
EXIT_LEASE_LOST = 75

EXAMPLE = """\
example:
  python -m rolloutfleet_operator --namespace rollouts \\
      --worker-image registry.example/rolloutfleet-worker:0.1.0 \\
      --operator-image registry.example/rolloutfleet-operator:0.1.0 \\
      --lease-namespace rollouts --log-format text
"""


def build_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """The command line; every flag may be given by the environment variable that its help names."""
    parser = argparse.ArgumentParser(
        prog="rolloutfleet-operator",
        description="Keeps fleets of vLLM engines as their RolloutFleet objects ask.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def flag(name: str, variable: str, help_text: str, default: str = "", **kwargs: object) -> None:
        given = environment.get(variable, default)
        shown = f" (environment: {variable}" + (f", default: {default})" if default else ")")
        parser.add_argument(name, default=given, help=help_text + shown, **kwargs)  # type: ignore[arg-type]

    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="serve this namespace alone; repeat for several; all namespaces unless given "
        "(environment: ROLLOUTFLEET_NAMESPACES, comma-separated)",
    )
    flag("--worker-image", "ROLLOUTFLEET_WORKER_IMAGE", "image of engines whose fleet names none")
    flag("--operator-image", "ROLLOUTFLEET_OPERATOR_IMAGE", "image of the sync pods: this operator's own")
    flag(
        "--lease-name",
        "ROLLOUTFLEET_LEASE_NAME",
        "Lease that makes one process the active one",
        "rolloutfleet-operator",
    )
    flag("--lease-namespace", "ROLLOUTFLEET_LEASE_NAMESPACE", "namespace of the Lease: the operator's own")
    flag(
        "--resync-seconds", "ROLLOUTFLEET_RESYNC_SECONDS", "look at every fleet at least this often", "300", type=float
    )
    flag("--liveness-port", "ROLLOUTFLEET_LIVENESS_PORT", "port of GET /healthz and GET /metrics", "8081", type=int)
    flag("--log-format", "ROLLOUTFLEET_LOG_FORMAT", "json or text", "json", choices=["json", "text"])
    parser.add_argument("--debug", action="store_true", help="log kopf's own doings as well")
    return parser


def read_config(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> tuple[Config, argparse.Namespace]:
    """What the process is told; ends the process with a usage message when something required is missing."""
    parser = build_parser(environment)
    options = parser.parse_args(arguments)
    missing = [
        f"--{name}"
        for name in ("worker-image", "operator-image", "lease-namespace")
        if not getattr(options, name.replace("-", "_"))
    ]
    if missing:
        parser.error(f"these are required: {', '.join(missing)}")
    named = options.namespace or environment.get("ROLLOUTFLEET_NAMESPACES", "").split(",")
    config = Config(
        images=Images(worker=options.worker_image, operator=options.operator_image),
        namespaces=tuple(sorted({name.strip() for name in named if name.strip()})),
        lease_name=options.lease_name,
        lease_namespace=options.lease_namespace,
        identity=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        resync_seconds=options.resync_seconds,
        liveness_port=options.liveness_port,
    )
    return config, options


async def serve(config: Config) -> None:
    """Runs until the operator ends.

    Raises:
        SetupError: CRDs or permissions are missing.
        LeaseLostError: another process may act now.
    """
    waiting = asyncio.current_task()
    assert waiting is not None
    # Until kopf takes the signal over: the first process of a container lives on after one that it has no handler for.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, waiting.cancel)
    ticks = Ticks(time.monotonic)
    metrics = Metrics()
    health = HealthServer(ticks, metrics, config.liveness_port)
    await health.start()
    gateway = await Gateway.connect(config.request_timeout_seconds)
    try:
        await check_served(gateway)
        reads_nodes = await check_access(gateway, config.namespaces, config.lease_namespace)
        if not reads_nodes:
            log.warning("nodes may not be read; whether an engine fits any node is left to the scheduler")
        lease = LeaseHolder(gateway, _terms(config))
        await lease.acquire(lambda holder: log.info("waiting for the Lease", extra={"fields": {"holder": holder}}))
        log.info("holding the Lease", extra={"fields": {"identity": config.identity}})
        runtime = Runtime(
            config=config,
            gateway=gateway,
            wakes=Wakes(),
            ticks=ticks,
            now=lambda: datetime.now(UTC),
            jitter=random.random,
            reads_nodes=reads_nodes,
            metrics=metrics,
        )
        try:
            await _run_while_held(runtime, lease)
        finally:
            await lease.release()
    finally:
        await gateway.close()
        await health.stop()


async def _run_while_held(runtime: Runtime, lease: LeaseHolder) -> None:
    """Returns when the operator has ended on a signal; raises what either side raises, and leaves neither running alone."""
    settings = kopf.OperatorSettings()
    configure(settings, runtime.config)
    namespaces = runtime.config.namespaces
    operator = asyncio.ensure_future(
        kopf.operator(
            registry=Handlers(runtime).registry,
            settings=settings,
            standalone=True,
            # kopf's own default asks the password database, which has no entry for the image's user.
            identity=runtime.config.identity,  # type: ignore[arg-type]
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
    )
    holding = asyncio.ensure_future(lease.hold())
    await asyncio.wait({operator, holding}, return_when=asyncio.FIRST_COMPLETED)
    if holding.done():
        # Another process may be acting by now: nothing may be drained or tidied up any more.
        log.critical("the Lease is lost, so this process ends", extra={"fields": {"error": str(holding.exception())}})
        logging.shutdown()
        os._exit(EXIT_LEASE_LOST)
    holding.cancel()
    with contextlib.suppress(asyncio.CancelledError, LeaseLostError):
        await holding
    await operator


def _terms(config: Config) -> LeaseTerms:
    return LeaseTerms(
        name=config.lease_name,
        namespace=config.lease_namespace,
        identity=config.identity,
        duration=config.lease_duration_seconds,
        renew=config.lease_renew_seconds,
        deadline=config.lease_deadline_seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 1 when the cluster is not prepared, 75 when the Lease was lost; ``plan`` has its own."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] == "plan":
        return plan_offline(given[1:])
    config, options = read_config(arguments, os.environ)
    configure_logging(options.log_format, debug=options.debug)
    try:
        asyncio.run(serve(config))
    except asyncio.CancelledError:
        log.info("told to end before the Lease was there")
    except OperatorError as error:
        log.critical(error.message, extra={"fields": {"reason": error.reason}})
        return EXIT_SETUP
    return 0


if __name__ == "__main__":
    sys.exit(main())
