"""What a fleet asks of its placement, and where its engines stand already."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolloutfleet_operator.plan.placement.nodes import NodeRules
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.tree import DEFAULT_LEVELS, Level

AXES = ("tensor", "expert", "pipeline", "engine", "fleet")
"""In the order in which they are cared for: a preference of a later one gives way first."""


@dataclass(frozen=True, slots=True)
class Rule:
    """For one axis the level that must hold it, and the one that had better; empty ones say nothing."""

    required: str = ""
    preferred: str = ""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One fleet. Field names are those of the fleet's spec."""

    fleet: str
    replicas: int
    parallelism: Parallelism = field(default_factory=Parallelism)
    levels: tuple[Level, ...] = DEFAULT_LEVELS
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """By axis."""
    gpus_per_node: int | None = None
    """Of each pod, or fewer where an engine has fewer; None leaves it to the kind of node."""
    spread: str = ""
    """The level over whose domains engines are spread evenly; empty packs them."""
    gpu_resource: str = "nvidia.com/gpu"
    nodes: NodeRules = field(default_factory=NodeRules)
    fields: tuple[str, ...] = ()
    """Those that were read from the spec, for those who ask what counted."""

    def rule(self, axis: str) -> Rule:
        """The axis's rule, an empty one when nothing is said."""
        return self.rules.get(axis, Rule())


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine that has its nodes already, in order of its pods."""

    fleet: str
    engine: int
    nodes: tuple[str, ...]
    gpus: int
    """Of each pod."""
    well: bool = True
    """Whether it may stay: its pods are Ready, or still starting."""
