"""What every pass needs and no pass owns: built once at start and handed in."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from rolloutfleet_operator.cluster.gateway import Gateway
from rolloutfleet_operator.config import Config
from rolloutfleet_operator.metrics import Metrics
from rolloutfleet_operator.reconcile.ticks import Ticks
from rolloutfleet_operator.reconcile.wakes import Wakes

FleetKey = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The process's configuration and its way to the cluster; clock and randomness are given, so that tests choose them."""

    config: Config
    gateway: Gateway
    wakes: Wakes
    ticks: Ticks
    now: Callable[[], datetime]
    jitter: Callable[[], float]
    """A number from 0 to 1, new each time."""
    reads_nodes: bool
    metrics: Metrics = field(default_factory=Metrics)
    monotonic: Callable[[], float] = time.monotonic
