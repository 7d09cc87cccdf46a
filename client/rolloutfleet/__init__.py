"""Refit a fleet of vLLM engines from any trainer, and generate with it.

>>> import rolloutfleet
>>> with rolloutfleet.connect("quickstart", namespace="default") as fleet:
...     fleet.refit(model, version=1)
...     fleet.generate_text(["Once upon a time"], greedy=True)

Importing this imports neither torch nor vLLM nor the Kubernetes client.
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rolloutfleet.connecting import connect
    from rolloutfleet.contract.trainer import FleetView, RefitResult, RefitView
    from rolloutfleet.errors import (
        CacheNotReset,
        ContractMismatch,
        DeadlineExceeded,
        FleetUnreachable,
        GenerationFailed,
        InvalidRequest,
        ManifestMismatch,
        RefitFailed,
        RolloutFleetError,
        SessionHeld,
        SessionLost,
        TeamLost,
        Unauthorized,
    )
    from rolloutfleet.fleet import Fleet
    from rolloutfleet.generation import GeneratedText, GeneratedTokens
    from rolloutfleet.sampling import Sampling
    from rolloutfleet.sources import Shard, ShardedTensors, WeightSource

__version__ = _version("rolloutfleet")

__all__ = [
    "CacheNotReset",
    "ContractMismatch",
    "DeadlineExceeded",
    "Fleet",
    "FleetUnreachable",
    "FleetView",
    "GeneratedText",
    "GeneratedTokens",
    "GenerationFailed",
    "InvalidRequest",
    "ManifestMismatch",
    "RefitFailed",
    "RefitResult",
    "RefitView",
    "RolloutFleetError",
    "Sampling",
    "SessionHeld",
    "SessionLost",
    "Shard",
    "ShardedTensors",
    "TeamLost",
    "Unauthorized",
    "WeightSource",
    "__version__",
    "connect",
]

_HOME: Final = {
    "Fleet": "fleet",
    "FleetView": "contract.trainer",
    "GeneratedText": "generation",
    "GeneratedTokens": "generation",
    "RefitResult": "contract.trainer",
    "RefitView": "contract.trainer",
    "Sampling": "sampling",
    "Shard": "sources",
    "ShardedTensors": "sources",
    "WeightSource": "sources",
    "connect": "connecting",
}


def __getattr__(name: str) -> Any:
    # The operator, the sync job and the workers import the contract from here; they should not load a client with it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
