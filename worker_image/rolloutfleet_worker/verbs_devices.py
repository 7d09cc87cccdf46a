"""Whether this container can use the RDMA devices that its fleet's fabric gives it: found out before vLLM loads a model."""

import logging
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rolloutfleet.contract.names import ENV_FABRIC

log = logging.getLogger(__name__)

DEVICES: Final = Path("/dev/infiniband")
_STATUS: Final = Path("/proc/self/status")
_IPC_LOCK_BIT: Final = 14
"""CAP_IPC_LOCK, see capabilities(7)."""


def find_verbs_fault(environment: Mapping[str, str], devices: Path = DEVICES) -> str:
    """Why no RDMA device can be opened here; empty when one can, or when the fabric needs none.

    A bound on memory that may be locked is told in the log alone: how much is needed depends on the group.
    """
    preset = environment.get(ENV_FABRIC, "")
    if not preset:
        return ""
    found = sorted(devices.glob("uverbs*"))
    if not found:
        return (
            f"fabric.preset is {preset}, but this container has no device {devices}/uverbs*: the device plugin of "
            "fabric.rdmaResource has given it none"
        )
    closed = [str(device) for device in found if not os.access(device, os.R_OK | os.W_OK)]
    if len(closed) == len(found):
        return f"fabric.preset is {preset}, but user {os.geteuid()} may not open {', '.join(closed)}"
    if warning := describe_lock_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _STATUS.read_text()):
        log.warning("fabric.preset is %s: %s", preset, warning)
    return ""


def describe_lock_limit(limit: int, status: str) -> str:
    """What bounds the memory that this process may lock for adapters; empty when nothing does.

    Args:
        limit: bytes, as ``RLIMIT_MEMLOCK`` says.
        status: the content of ``/proc/self/status``.
    """
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    if limit == resource.RLIM_INFINITY or int(effective, 16) >> _IPC_LOCK_BIT & 1:
        return ""
    return (
        f"this process may lock {limit / 2**20:.0f} MiB of memory, beyond which adapters cannot be used: a user that is not root has "
        "IPC_LOCK in vain, so let the container runtime give containers an unlimited memlock (LimitMEMLOCK=infinity)"
    )
