"""The variables that change how a group communicates; they must be equal on every member."""

from collections.abc import Mapping
from typing import Final

_PREFIXES: Final = ("GLOO_", "NCCL_")
_OF_ONE_PROCESS: Final = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_HOSTID"})
"""Variables that name a host or a log, and so differ by right."""


def communication_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that the ledger compares, sorted by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) and name not in _OF_ONE_PROCESS
    }
