"""Start one engine of a fleet, or one pod's part of it.

The operator renders this command into every engine pod; by hand, with the variables that it sets::

    ROLLOUTFLEET_FLEET=demo ROLLOUTFLEET_FLEET_UID=1 ROLLOUTFLEET_POD_NAME=demo-0-0-0 ROLLOUTFLEET_POD_UID=2 ROLLOUTFLEET_ENGINE=0 \\
    ROLLOUTFLEET_TOKEN_FILE=token python3 -m rolloutfleet_worker -- Qwen/Qwen2.5-0.5B --enforce-eager
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

from rolloutfleet_worker.follower import Follower
from rolloutfleet_worker.launcher import Launcher
from rolloutfleet_worker.settings import SettingsError, find_termination_log, read_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until vLLM ends or the pod is stopped; the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="rolloutfleet-worker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "vllm_arguments", nargs="*", metavar="VLLM_ARGUMENT", help="arguments of `vllm serve`, after --"
    )
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        settings = read_settings()
    except SettingsError as error:
        if (log := find_termination_log()) is not None:
            log.write_text(str(error)[:4000])
        parser.exit(2, f"rolloutfleet-worker: {error}\n")
    role = Follower if settings.pod_rank else Launcher
    return asyncio.run(role(settings, parsed.vllm_arguments).run())


if __name__ == "__main__":
    sys.exit(main())
