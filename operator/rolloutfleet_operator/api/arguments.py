"""Which arguments of ``vllm serve`` the operator sets itself, and where a user sets them instead."""

from collections.abc import Iterable, Mapping
from typing import Final

_ONE_POD = "an engine of this release is one pod with tensor parallelism alone, so remove it"
_LAUNCHER = "the engine's launcher sets it, so remove it"
_PORTS = "engines answer plain HTTP on port 8000 of their pod, so remove it"

SHADOWED: Final[Mapping[str, str]] = {
    "config": "it would hide arguments from the operator, so list each argument in spec.engine.args",
    "data-parallel-address": _ONE_POD,
    "data-parallel-rank": _ONE_POD,
    "data-parallel-size": _ONE_POD,
    "data-parallel-size-local": _ONE_POD,
    "data-parallel-start-rank": _ONE_POD,
    "dtype": "set spec.model.dtype instead",
    "headless": _ONE_POD,
    "host": _PORTS,
    "load-format": "set spec.model.loadFormat instead",
    "master-addr": _ONE_POD,
    "master-port": _ONE_POD,
    "max-model-len": "set spec.model.maxModelLength instead",
    "middleware": _LAUNCHER,
    "model": "set spec.model.name and spec.model.source instead",
    "nnodes": _ONE_POD,
    "node-rank": _ONE_POD,
    "pipeline-parallel-size": _ONE_POD,
    "port": _PORTS,
    "revision": "set spec.model.revision instead",
    "served-model-name": "set spec.model.servedName instead",
    "ssl-certfile": _PORTS,
    "ssl-keyfile": _PORTS,
    "tensor-parallel-size": "set spec.parallelism.tensor instead",
    "uds": _PORTS,
    "weight-transfer-config": _LAUNCHER,
}
"""Argument -> what to do instead of setting it in ``spec.engine.args``."""

ARGUMENT_PATTERN: Final = "^[a-z0-9]+(-[a-z0-9]+)*([.][A-Za-z0-9_-]+)*$"
"""An argument's name without its leading dashes. No underscores: vLLM reads them as dashes, and a shadowed name could hide there."""


def shadow_faults(names: Iterable[str]) -> list[str]:
    """A sentence for each name that shadows a field, in full or abbreviated: vLLM takes any unambiguous prefix for the whole."""
    faults = []
    for name in sorted(names):
        for shadowed, advice in SHADOWED.items():
            if shadowed.startswith(name):
                short_for = "" if name == shadowed else f" (vLLM reads it as {shadowed})"
                faults.append(f"engine.args.{name}{short_for} is not for users to set: {advice}")
                break
    return faults
