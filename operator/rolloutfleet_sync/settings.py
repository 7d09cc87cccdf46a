"""The sync job's configuration: from the environment in a pod, from flags when run by hand."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rolloutfleet.contract import names
from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.policy import RefitPolicy

EXAMPLE = """
in a pod the operator sets everything; by hand, without Kubernetes:

  cat > roster.json <<END
  {"fleet": "demo", "fleetUid": "demo-uid", "engines": 1, "members": [
    {"engine": 0, "podName": "demo-0", "podUid": "demo-0-uid", "address": "127.0.0.1", "ranks": 1}]}
  END
  python3 -m rolloutfleet_sync --roster roster.json --status status.json --token-file token --model demo

An address may be HOST:PORT, the launcher's control port, where several engines share a host; the engine then serves one port below.
"""


class Settings(BaseModel):
    """What the process needs to know before it starts."""

    model_config = ConfigDict(frozen=True)

    fleet: str = Field(min_length=1)
    fleet_uid: str = Field(min_length=1)
    namespace: str
    weightsync: str
    model: str
    policy: RefitPolicy
    token: str = Field(min_length=1)
    roster: Path | None
    status: Path | None
    host: str | None
    port: int = Field(ge=0, le=65535)
    worker_port: int = Field(ge=1, le=65535)
    lease_seconds: float = Field(gt=0)
    log_level: str


class SettingsError(Exception):
    """A setting is missing or wrong; the message names the flag and the variable."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m rolloutfleet_sync",
        description="Forms the group of trainer and workers of one fleet and publishes weight versions, one at a time.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--roster", type=Path, metavar="FILE", help="roster in a JSON file instead of the members ConfigMap")
    add("--status", type=Path, metavar="FILE", help="status in a JSON file instead of the WeightSync")
    add("--fleet", help=f"name of the fleet (default: ${names.ENV_FLEET}, or the roster file's)")
    add("--fleet-uid", help=f"uid of the fleet (default: ${names.ENV_FLEET_UID}, or the roster file's)")
    add("--namespace", help=f"namespace of the fleet (default: ${names.ENV_NAMESPACE})")
    add("--weightsync", help=f"name of the WeightSync (default: ${names.ENV_SYNC}, or the fleet's)")
    add("--model", help=f"name under which the engines serve the model (default: ${names.ENV_MODEL})")
    add("--policy", help=f"refit policy as JSON (default: ${names.ENV_REFIT_POLICY}, or Auto with --roster)")
    add("--token-file", help=f"file that holds the bearer token (default: ${names.ENV_TOKEN_FILE})")
    add("--host", help="address to listen on (default: every address)")
    add("--port", type=int, default=names.SYNC_PORT, help="port to listen on (default: %(default)s)")
    add(
        "--worker-port",
        type=int,
        default=names.WORKER_CONTROL_PORT,
        help="control port of the launchers (default: %(default)s)",
    )
    add("--lease-seconds", type=float, default=30.0, help="a trainer's lease (default: %(default)s)")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def read_settings(arguments: Sequence[str] | None, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings; raises SettingsError, pydantic's ValidationError for values, and OSError for files."""
    flags = build_parser().parse_args(arguments)
    given = os.environ if environment is None else environment
    roster = Roster.model_validate_json(flags.roster.read_bytes()) if flags.roster else None

    def pick(flag: str, variable: str, default: str | None = None) -> str:
        value = getattr(flags, flag) or given.get(variable) or default
        if value is None:
            raise SettingsError(f"--{flag.replace('_', '-')} or the variable {variable} must be set")
        return str(value)

    fleet = pick("fleet", names.ENV_FLEET, roster.fleet if roster else None)
    policy = pick("policy", names.ENV_REFIT_POLICY, '{"transport": "Auto"}' if roster else None)
    token_file = Path(pick("token_file", names.ENV_TOKEN_FILE, names.TOKEN_FILE))
    return Settings(
        fleet=fleet,
        fleet_uid=pick("fleet_uid", names.ENV_FLEET_UID, roster.fleet_uid if roster else None),
        namespace=pick("namespace", names.ENV_NAMESPACE, "" if roster and flags.status else None),
        weightsync=pick("weightsync", names.ENV_SYNC, fleet),
        model=pick("model", names.ENV_MODEL),
        policy=RefitPolicy.model_validate_json(policy),
        token=token_file.read_text().strip(),
        roster=flags.roster,
        status=flags.status,
        host=flags.host,
        port=flags.port,
        worker_port=flags.worker_port,
        lease_seconds=flags.lease_seconds,
        log_level=flags.log_level,
    )
