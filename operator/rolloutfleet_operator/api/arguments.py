"""Which arguments and variables of vLLM are not for users: set by the operator, owned by the launcher, or at odds with refits."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

_EXPERTS = (
    "experts would move between ranks, and a refit would write their weights where they no longer are, so remove it"
)
_ADAPTERS = "set spec.engine.lora instead"
_OWN_ADAPTERS = "adapters come from the trainer, by Fleet.refit_adapter(), so remove it"
_DRAFT = "a refit does not reach the weights of a draft, so remove it"
_HTTP = "engines answer plain HTTP on port 8000 of their pod, so remove it"
_KEPT_OUTSIDE = "what it keeps outside the engine was computed with old weights and would outlive a refit, so remove it"
_LAUNCHER = "the engine's launcher sets it, so remove it"
_OFFLOAD = (
    "vLLM cannot reload weights that are offloaded to the CPU, so remove it; spread the model with spec.parallelism"
)
_SHAPE = "spec.parallelism says how an engine is spread over GPUs and pods, so remove it"
_UNSUPPORTED = "refits do not know engines that are spread this way, so remove it"
_OWN_CLASS = "refits rely on vLLM's own class, so remove it"

SHADOWED: Final[Mapping[str, str]] = {
    "api-server-count": "the door that refits close is one API server's, so remove it",
    "api-key": "the fleet's client generates without a key, so remove it",
    "config": "it would hide arguments from the operator, so list each argument in spec.engine.args",
    "cpu-offload-gb": _OFFLOAD,
    "data-parallel-address": _SHAPE,
    "data-parallel-backend": _SHAPE,
    "data-parallel-external-lb": _SHAPE,
    "data-parallel-hybrid-lb": _SHAPE,
    "data-parallel-multi-port-external-lb": _SHAPE,
    "data-parallel-rank": _SHAPE,
    "data-parallel-rpc-port": _SHAPE,
    "data-parallel-size": "set spec.parallelism.expert instead",
    "data-parallel-size-local": _SHAPE,
    "data-parallel-start-rank": _SHAPE,
    "data-parallel-supervisor-port": _SHAPE,
    "disable-access-log-for-endpoints": _LAUNCHER,
    "distributed-executor-backend": "vLLM runs the ranks as processes of the engine's pods, so remove it",
    "dtype": "set spec.model.dtype instead",
    "ec-transfer-config": _KEPT_OUTSIDE,
    "elastic-ep-max-dp-size": _UNSUPPORTED,
    "enable-elastic-ep": _UNSUPPORTED,
    "enable-eplb": _EXPERTS,
    "enable-fault-tolerance": _UNSUPPORTED,
    "default-mm-loras": _OWN_ADAPTERS,
    "enable-lora": _ADAPTERS,
    "enable-ssl-refresh": _HTTP,
    "eplb-config": _EXPERTS,
    "fault-tolerance-config": _SHAPE,
    "grpc": _HTTP,
    "grpc-port": _HTTP,
    "headless": _SHAPE,
    "host": _HTTP,
    "kv-offloading-backend": _KEPT_OUTSIDE,
    "kv-offloading-size": _KEPT_OUTSIDE,
    "kv-transfer-config": _KEPT_OUTSIDE,
    "load-format": "set spec.model.loadFormat instead",
    "lora-modules": _OWN_ADAPTERS,
    "lora-target-modules": _ADAPTERS,
    "master-addr": _SHAPE,
    "master-port": _SHAPE,
    "max-lora-rank": _ADAPTERS,
    "max-loras": _ADAPTERS,
    "max-model-len": "set spec.model.maxModelLength instead",
    "middleware": _LAUNCHER,
    "model": "set spec.model.name and spec.model.source instead",
    "nnodes": _SHAPE,
    "node-rank": _SHAPE,
    "offload-backend": _OFFLOAD,
    "offload-group-size": _OFFLOAD,
    "pipeline-parallel-size": "set spec.parallelism.pipeline instead",
    "port": _HTTP,
    "prefill-context-parallel-size": _UNSUPPORTED,
    "revision": "set spec.model.revision instead",
    "root-path": _HTTP,
    "scheduler-cls": _OWN_CLASS,
    "served-model-name": "set spec.model.servedName instead",
    "spec-method": _DRAFT,
    "spec-model": _DRAFT,
    "spec-tokens": _DRAFT,
    "speculative-config": _DRAFT,
    "ssl-ca-certs": _HTTP,
    "ssl-cert-reqs": _HTTP,
    "ssl-certfile": _HTTP,
    "ssl-ciphers": _HTTP,
    "ssl-keyfile": _HTTP,
    "tensor-parallel-size": "set spec.parallelism.tensor instead",
    "tokens-only": "it takes away /v1/completions, which fleets are asked through, so remove it",
    "uds": _HTTP,
    "weight-transfer-config": _LAUNCHER,
    "worker-cls": _OWN_CLASS,
    "worker-extension-cls": _OWN_CLASS,
}
"""Argument of vLLM 0.32 -> what to do instead of setting it in ``spec.engine.args``."""

ARGUMENT_PATTERN: Final = "^[a-z0-9]+(-[a-z0-9]+)*([.][A-Za-z0-9_-]+)*$"
"""An argument's name without its leading dashes. No underscores: vLLM reads them as dashes, and a shadowed name could hide there."""

ARGUMENT_RULE: Final = (
    "names are lower-case words joined by dashes, without leading dashes, such as gpu-memory-utilization"
)

RESERVED_ENV_PREFIX: Final = "ROLLOUTFLEET_"

_DOOR = "requests would come past the door that refits close, so remove it"
_LOADS_CODE = "it lets requests run code in the engine, so remove it"

RESERVED_ENV: Final[Mapping[str, str]] = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": _LOADS_CODE,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "it opens routes that change what the engine serves between refits, so remove it",
    "VLLM_DP_SIZE": _SHAPE,
    "VLLM_PLUGINS": "it would leave out the plugin that receives weights, so remove it",
    "VLLM_RUST_FRONTEND_PATH": _DOOR,
    "VLLM_SERVER_DEV_MODE": "it opens routes that pause the engine and change its weights between refits, so remove it",
    "VLLM_USE_RUST_FRONTEND": _DOOR,
}
"""Environment variable of vLLM 0.32 -> why ``spec.engine.env`` may not hold it."""


def argument_faults(names: Iterable[str]) -> list[str]:
    """A sentence for each name that is misspelled or not for users, also when abbreviated: vLLM takes unambiguous prefixes.

    Of a dotted name the first part counts: ``a.b=c`` is an argument ``a`` with the value ``{"b": "c"}``, added after all others.
    """
    faults = []
    for name in sorted(names):
        if not re.fullmatch(ARGUMENT_PATTERN, name):
            faults.append(f"engine.args.{name}: {ARGUMENT_RULE}")
            continue
        argument = name.split(".")[0]
        shadowed = _shadowed_by(argument)
        if shadowed is not None:
            short_for = "" if shadowed == name else f" (vLLM reads it as {shadowed})"
            faults.append(f"engine.args.{name}{short_for} is not for users to set: {SHADOWED[shadowed]}")
    return faults


def environment_faults(names: Iterable[str]) -> list[str]:
    """A sentence for each variable that belongs to the operator or breaks what refits rely on."""
    faults = []
    for name in sorted(names):
        if name.startswith(RESERVED_ENV_PREFIX):
            faults.append(
                f"engine.env: {name} begins with {RESERVED_ENV_PREFIX}, which belongs to the operator; choose another name"
            )
        elif name in RESERVED_ENV:
            faults.append(f"engine.env: {name} is not for users to set: {RESERVED_ENV[name]}")
    return faults


def _shadowed_by(argument: str) -> str | None:
    if argument in SHADOWED:
        return argument
    return next((name for name in SHADOWED if name.startswith(argument)), None)
