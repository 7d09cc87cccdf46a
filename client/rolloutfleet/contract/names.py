"""Names that several parties must agree on: versions, ports, routes, environment variables, labels and headers."""

from typing import Final

CONTRACT_VERSION: Final = 2
"""Raised when a message changes its meaning; a party refuses another version by name."""

API_PREFIX: Final = "/rolloutfleet/v1"
GROUP: Final = "rolloutfleet.io"

GENERATION_PORT: Final = 8000
WORKER_CONTROL_PORT: Final = 8001
SYNC_PORT: Final = 8080

TOKEN_DIRECTORY: Final = "/var/run/rolloutfleet"  # noqa: S105 - a name, not a token
TOKEN_FILE: Final = "/var/run/rolloutfleet/token"  # noqa: S105 - a name, not a token
TOKEN_KEY: Final = "token"  # noqa: S105 - a name, not a token
"""Key of the bearer token in the fleet's Secret."""

MEMBERS_KEY: Final = "members.json"
"""Key of the :class:`~rolloutfleet.contract.members.Roster` in the fleet's members ConfigMap."""

KEPT_MANIFESTS: Final = 4
"""How many manifests of whole weights a worker remembers, so that they need not be checked again: those that were checked, prepared for
or received last."""
KEPT_ADAPTER_MANIFESTS: Final = 64
"""As many of adapters."""

HEADER_ENGINE: Final = "x-rolloutfleet-engine"
HEADER_WEIGHT_VERSION: Final = "x-rolloutfleet-weight-version"

ENV_FLEET: Final = "ROLLOUTFLEET_FLEET"
ENV_FLEET_UID: Final = "ROLLOUTFLEET_FLEET_UID"
ENV_NAMESPACE: Final = "ROLLOUTFLEET_NAMESPACE"
ENV_POD_NAME: Final = "ROLLOUTFLEET_POD_NAME"
ENV_POD_UID: Final = "ROLLOUTFLEET_POD_UID"
ENV_POD_IP: Final = "ROLLOUTFLEET_POD_IP"
ENV_ENGINE: Final = "ROLLOUTFLEET_ENGINE"
ENV_MODEL: Final = "ROLLOUTFLEET_MODEL"
"""Name under which the engines serve the model."""
ENV_RANKS: Final = "ROLLOUTFLEET_RANKS"
"""Worker processes of the engine, in all of its pods."""
ENV_PODS: Final = "ROLLOUTFLEET_PODS"
"""Pods of the engine; 1 unless set."""
ENV_POD_RANK: Final = "ROLLOUTFLEET_POD_RANK"
"""Which of the engine's pods this is; 0, the leader, unless set."""
ENV_LEADER: Final = "ROLLOUTFLEET_LEADER"
"""Host name of the leader's pod, with its control port where that is not the usual one; for followers."""
ENV_ENGINE_PORT: Final = "ROLLOUTFLEET_ENGINE_PORT"
"""The first of the two ports at which the leader's vLLM awaits that of followers."""
ENV_TOKEN_FILE: Final = "ROLLOUTFLEET_TOKEN_FILE"  # noqa: S105 - a name, not a token
ENV_SYNC: Final = "ROLLOUTFLEET_WEIGHTSYNC"
ENV_EPOCH_FLOOR: Final = "ROLLOUTFLEET_EPOCH_FLOOR"
ENV_VERSION_FLOOR: Final = "ROLLOUTFLEET_VERSION_FLOOR"
ENV_REFIT_POLICY: Final = "ROLLOUTFLEET_REFIT_POLICY"
"""JSON of :class:`~rolloutfleet.contract.policy.RefitPolicy`."""
ENV_GRACE_SECONDS: Final = "ROLLOUTFLEET_GRACE_SECONDS"
"""How long after the order to end the kubelet waits before it kills."""
ENV_FABRIC: Final = "ROLLOUTFLEET_FABRIC"
"""The fabric's preset, where it is one that reads and writes remote memory."""
ENV_AWAIT_FIRST_REFIT: Final = "ROLLOUTFLEET_AWAIT_FIRST_REFIT"
"""``true`` when version 0 holds no usable weights (dummy load format): the engine is not Ready before its first refit."""
