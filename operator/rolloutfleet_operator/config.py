"""What an operator process is told at start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Images:
    """Images of the pods that the operator makes, for fleets that name none."""

    worker: str
    operator: str


@dataclass(frozen=True, slots=True)
class Config:
    """One operator process; every duration is in seconds."""

    images: Images
    namespaces: tuple[str, ...]
    """Namespaces to serve; empty means all of them."""
    lease_name: str
    lease_namespace: str
    identity: str
    """Who holds the Lease: unique to this process."""
    resync_seconds: float = 300.0
    pass_deadline_seconds: float = 120.0
    settle_seconds: float = 0.05
    """How long a woken loop waits for further events, so that a burst makes one pass."""
    request_timeout_seconds: float = 30.0
    creation_concurrency: int = 16
    lease_duration_seconds: int = 15
    lease_renew_seconds: float = 2.0
    lease_deadline_seconds: float = 10.0
    """How long renewals may fail before the process ends; below the duration, so that two holders never overlap."""
    liveness_port: int = 8081
