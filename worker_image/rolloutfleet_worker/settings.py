"""What the operator tells the launcher through the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rolloutfleet.contract import names
from rolloutfleet_worker.fence import Identity
from rolloutfleet_worker.verbs_devices import DEVICES, find_verbs_fault
from rolloutfleet_worker.virtual_gpu import PRELOAD_FILE, find_virtual_gpu

_FORBIDDEN = {
    "VLLM_SERVER_DEV_MODE": "its routes pause, resume and change the engine behind the sync job's back",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "its routes take pickled code",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "its routes change what the engine computes behind the sync job's back",
    "VLLM_USE_RUST_FRONTEND": "that server does not run the fleet's middleware",
    "VLLM_RUST_FRONTEND_PATH": "that server does not run the fleet's middleware",
    "VLLM_PLUGINS": "it would keep vLLM from loading the fleet's plugin",
}


ENGINE_PORT = 29501


class SettingsError(Exception):
    """The environment lacks something or holds a value that cannot be used; names all of it at once."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The launcher's settings, read once at start."""

    identity: Identity
    engine: int
    ranks: int
    """Of the engine, in all its pods."""
    pods: int
    pod_rank: int
    """0 is the leader."""
    leader: str
    """Host and control port of the leader; empty for the leader itself."""
    engine_port: int
    """At which the leader's vLLM awaits that of followers; the one above is taken as well."""
    address: str
    token: str
    await_first_refit: bool
    generation_port: int
    control_port: int
    termination_log: Path | None
    grace_seconds: int
    """How long after the order to end the kubelet waits; 0 where nobody routes requests here, so that none is waited for."""


def read_settings(
    environment: Mapping[str, str] = os.environ, preload: Path = PRELOAD_FILE, devices: Path = DEVICES
) -> Settings:
    """Settings from environment variables.

    Raises:
        SettingsError: names every variable that is missing or wrong.
    """
    required = (names.ENV_FLEET, names.ENV_FLEET_UID, names.ENV_POD_NAME, names.ENV_POD_UID, names.ENV_ENGINE)
    faults = [f"{name} is not set" for name in required if not environment.get(name)]
    engine = _whole_number(environment, names.ENV_ENGINE, 0, faults)
    ranks = _whole_number(environment, names.ENV_RANKS, 1, faults)
    pods = _whole_number(environment, names.ENV_PODS, 1, faults)
    pod_rank = _whole_number(environment, names.ENV_POD_RANK, 0, faults)
    engine_port = _whole_number(environment, names.ENV_ENGINE_PORT, ENGINE_PORT, faults)
    faults += _find_misfits(environment, ranks, pods, pod_rank)
    token_file = Path(environment.get(names.ENV_TOKEN_FILE, names.TOKEN_FILE))
    token = token_file.read_text().strip() if token_file.is_file() else ""
    faults += [f"{name} is set; {reason}" for name, reason in _FORBIDDEN.items() if environment.get(name, "0") != "0"]
    faults += filter(None, [find_virtual_gpu(environment, preload), find_verbs_fault(environment, devices)])
    if not token:
        faults.append(f"{names.ENV_TOKEN_FILE} names {token_file}, which holds no token")
    generation_port = _whole_number(environment, "ROLLOUTFLEET_GENERATION_PORT", names.GENERATION_PORT, faults)
    grace = _whole_number(environment, names.ENV_GRACE_SECONDS, 0, faults)
    control_port = _whole_number(environment, "ROLLOUTFLEET_CONTROL_PORT", names.WORKER_CONTROL_PORT, faults)
    if faults:
        raise SettingsError("; ".join(faults))
    return Settings(
        identity=Identity(
            fleet=environment[names.ENV_FLEET],
            fleet_uid=environment[names.ENV_FLEET_UID],
            pod_name=environment[names.ENV_POD_NAME],
            pod_uid=environment[names.ENV_POD_UID],
            instance=uuid4().hex,
        ),
        engine=engine,
        ranks=ranks,
        pods=pods,
        pod_rank=pod_rank,
        leader=_with_port(environment.get(names.ENV_LEADER, "")),
        engine_port=engine_port,
        address=environment.get(names.ENV_POD_IP, "") or "0.0.0.0",  # noqa: S104 - outside a cluster every address is ours
        token=token,
        await_first_refit=environment.get(names.ENV_AWAIT_FIRST_REFIT, "").lower() == "true",
        generation_port=generation_port,
        control_port=control_port,
        termination_log=find_termination_log(environment),
        grace_seconds=grace,
    )


def _find_misfits(environment: Mapping[str, str], ranks: int, pods: int, pod_rank: int) -> list[str]:
    faults = []
    if pods < 1 or ranks % max(pods, 1):
        faults.append(f"{names.ENV_RANKS} is {ranks}, which does not divide evenly among {names.ENV_PODS}={pods}")
    if pod_rank >= max(pods, 1):
        faults.append(
            f"{names.ENV_POD_RANK} is {pod_rank}, and an engine of {names.ENV_PODS}={pods} ends with {pods - 1}"
        )
    if pod_rank and not environment.get(names.ENV_LEADER):
        faults.append(f"{names.ENV_LEADER} is not set, and a pod of rank {pod_rank} needs it")
    if pods > 1 and not environment.get(names.ENV_POD_IP):
        faults.append(f"{names.ENV_POD_IP} is not set, and the engine's {pods} pods must reach each other")
    return faults


def _with_port(leader: str) -> str:
    return f"{leader}:{names.WORKER_CONTROL_PORT}" if leader and ":" not in leader else leader


def find_termination_log(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file whose content the kubelet shows when the container has ended; None outside of a cluster."""
    path = Path(environment.get("ROLLOUTFLEET_TERMINATION_LOG", "/dev/termination-log"))
    return path if path.exists() else None


def _whole_number(environment: Mapping[str, str], name: str, default: int, faults: list[str]) -> int:
    text = environment.get(name, "")
    if text and not text.isdecimal():
        faults.append(f"{name} is {text!r}, not a whole number")
        return default
    return int(text or default)
