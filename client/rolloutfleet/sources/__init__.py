"""Weights as a trainer keeps them: whole, sharded by FSDP2 or by a table, or in a checkpoint; importing this loads no torch."""

from typing import Any

from rolloutfleet.sources.checkpoint import Checkpoint, open_checkpoint
from rolloutfleet.sources.named import NamedTensors
from rolloutfleet.sources.safetensors import CheckpointError
from rolloutfleet.sources.sharded import Shard, ShardedTensors
from rolloutfleet.sources.source import Span, WeightSource

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "NamedTensors",
    "Shard",
    "ShardedTensors",
    "Span",
    "WeightSource",
    "open_checkpoint",
    "source_of",
]


def source_of(tensors: Any, *, team: bool) -> WeightSource:
    """The source for what a caller gave to ``refit``: a source itself, or a module, mapping or list of tensors.

    Parts of tensors are taken only in a team. Raises TypeError and ValueError as :class:`NamedTensors`.
    """
    if isinstance(tensors, WeightSource):
        return tensors
    return NamedTensors(tensors, sharded=team)
