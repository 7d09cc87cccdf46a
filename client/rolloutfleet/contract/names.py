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
"""Worker processes in the pod."""
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
