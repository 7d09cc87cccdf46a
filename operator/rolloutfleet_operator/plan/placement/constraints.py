"""Levels for each axis -> the nested domains that an engine must keep, in the order in which they are tried."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement.request import AXES, PlacementRequest
from rolloutfleet_operator.plan.placement.shape import Nesting, Parallelism, Shape, find_shape
from rolloutfleet_operator.plan.placement.tree import CLUSTER, Tree

NVLINK = "nvlink"
"""The level that tensor groups keep unless something else is said, where there is one."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Depths for one axis: at least ``required``, and better ``preferred``."""

    required: int
    preferred: int

    def steps(self) -> range:
        """Depths to try, best first."""
        return range(self.preferred, self.required - 1, -1)

    def missed_by(self, depth: int) -> int:
        """Levels by which a depth is wider than what is preferred."""
        return max(0, self.preferred - depth)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Depths of the domains that an engine, its middle units and its tensor groups each lie in; each is at least the one before."""

    engine: int
    middle: int
    tensor: int
    nesting: Nesting

    def allows(self, shape: Shape, hosts: int) -> bool:
        """Whether the shape can keep them at all: a single node takes one pod of an engine."""
        if shape.nesting is not self.nesting:
            return False
        several = ((self.engine, shape.pods), (self.middle, shape.middle_pods), (self.tensor, shape.tensor_pods))
        return all(depth < hosts or pods == 1 for depth, pods in several)

    def inside(self, depth: int) -> "Bounds":
        """The same inside a domain of a depth, which may be narrower than what they ask for."""
        return Bounds(max(self.engine, depth), max(self.middle, depth), max(self.tensor, depth), self.nesting)

    def narrowed(self, shape: Shape, hosts: int) -> "Bounds":
        """The same, with a unit that is made of one smaller unit as narrow as that one: so the search begins where it must end."""
        tensor = hosts if shape.tensor_pods == 1 else self.tensor
        middle = tensor if shape.middle_tensors == 1 else self.middle
        return Bounds(middle if shape.middles == 1 else self.engine, middle, tensor, self.nesting)


@dataclass(frozen=True, slots=True)
class Constraints:
    """A fleet's ladders in terms of a tree."""

    sizes: Parallelism
    ladders: dict[str, Ladder]
    spread: int
    """Depth over whose domains engines spread; 0 packs."""

    @property
    def loosest(self) -> Bounds:
        """What is required, and no more."""
        return self._bounds({axis: ladder.required for axis, ladder in self.ladders.items()})

    def tries(self) -> tuple[Bounds, ...]:
        """Bounds from the most preferred to what is required; of preferences that collide those of the later axis give way first."""
        axes = [axis for axis in AXES if axis in self.ladders and axis != "fleet"]
        found: dict[Bounds, None] = {}
        for depths in product(*(self.ladders[axis].steps() for axis in axes)):
            given = dict(zip(axes, depths, strict=True))
            found.setdefault(self._bounds(given | {"fleet": self.ladders["fleet"].required}))
        return tuple(found)

    def _bounds(self, depths: dict[str, int]) -> Bounds:
        sizes, engine = self.sizes, max(depths["engine"], depths["fleet"])
        pipeline = max(depths["pipeline"], engine) if sizes.pipeline > 1 else engine
        expert = max(depths["expert"], engine) if sizes.expert > 1 else engine
        tensor = max(depths["tensor"], engine)
        if sizes.data == 1:
            # One replica: the expert group is a tensor group, the pipeline is the engine.
            return Bounds(pipeline, pipeline, max(tensor, expert, pipeline), Nesting.REPLICAS)
        if sizes.pipeline == 1:
            # One stage: the expert group is the engine.
            return Bounds(expert, expert, max(tensor, expert), Nesting.REPLICAS)
        # Expert groups (one stage, all replicas) and pipelines (one replica, all stages) cross, so whichever has the wider domain
        # holds the whole engine in one.
        if expert > pipeline:
            return Bounds(pipeline, expert, max(tensor, expert), Nesting.STAGES)
        return Bounds(expert, pipeline, max(tensor, pipeline), Nesting.REPLICAS)

    def missed(self, attained: dict[str, int]) -> tuple[int, ...]:
        """For each axis, in order of care, the levels by which it is wider than preferred."""
        return tuple(self.ladders[axis].missed_by(attained.get(axis, 0)) for axis in AXES if axis != "fleet")


def read_constraints(request: PlacementRequest, tree: Tree) -> Constraints:
    """The request's ladders in terms of the tree.

    Raises:
        InvalidSpecError: a level that does not exist, or a preferred level that is wider than the required one.
    """
    faults = list(_faults(request, tree))
    if faults:
        raise InvalidSpecError(f"fleet {request.fleet}: " + "; ".join(faults))
    ladders = {axis: _ladder(request, tree, axis) for axis in AXES}
    return Constraints(request.parallelism, ladders, tree.depths[request.spread] if request.spread else 0)


def _faults(request: PlacementRequest, tree: Tree) -> Iterator[str]:
    levels, sizes, pod = ", ".join(tree.depths), request.parallelism, request.gpus_per_node
    if pod is not None and (pod < 1 or find_shape(sizes, min(pod, sizes.world), Nesting.REPLICAS) is None):
        yield (
            f"parallelism.gpusPerNode is {pod}, and the {sizes.world} GPUs of an engine ({sizes}) do not divide into pods of {pod} "
            "without cutting a tensor group or a replica unevenly"
        )
    for axis in AXES:
        rule = request.rule(axis)
        for kind, level in (("required", rule.required), ("preferred", rule.preferred)):
            if level and level not in tree.depths:
                yield f"placement.{axis}.{kind} names the level {level!r}, which is none of {levels}"
        required, preferred = tree.depths.get(rule.required, 0), tree.depths.get(rule.preferred)
        if preferred is not None and preferred < required:
            yield (
                f"placement.{axis}.preferred {rule.preferred} is wider than placement.{axis}.required {rule.required}: "
                "what is preferred must be the same level or a narrower one"
            )
    if request.spread and (request.spread not in tree.depths or request.spread == CLUSTER):
        yield f"placement.spread names the level {request.spread!r}, which is none of {', '.join(list(tree.depths)[1:])}"


def _ladder(request: PlacementRequest, tree: Tree, axis: str) -> Ladder:
    rule = request.rule(axis)
    required = tree.depths[rule.required] if rule.required else 0
    if rule.preferred:
        preferred = tree.depths[rule.preferred]
        if axis == "tensor" and not rule.required:
            required = min(preferred, _tensor_default(tree))
        return Ladder(required, preferred)
    if rule.required or axis == "fleet":
        # Anything inside is as good: whole domains decide.
        return Ladder(required, required)
    return Ladder(_tensor_default(tree) if axis == "tensor" else 0, tree.hosts)


def _tensor_default(tree: Tree) -> int:
    return tree.depths.get(NVLINK, tree.hosts)


def attained_depths(tree: Tree, sizes: Parallelism, pod_gpus: int, leaves: tuple[int, ...]) -> dict[str, int]:
    """For each axis the depth of the narrowest domains that hold its groups, the widest of them where they differ.

    Args:
        tree: of the cluster.
        sizes: the engine's.
        pod_gpus: ranks of each pod.
        leaves: the pods' nodes, in order of their ranks.
    """
    tensor, replica, data = sizes.tensor, sizes.replica, sizes.data

    def depth(groups: Iterator[set[int]]) -> int:
        return min(tree.depth[tree.meeting(group)] for group in groups)

    def pods(ranks: range) -> set[int]:
        return {leaves[rank // pod_gpus] for rank in ranks}

    stages = (
        set().union(*(pods(range(d * replica + s * tensor, d * replica + (s + 1) * tensor)) for d in range(data)))
        for s in range(sizes.pipeline)
    )
    return {
        "tensor": depth(pods(range(first, first + tensor)) for first in range(0, sizes.world, tensor)),
        "expert": depth(stages) if sizes.expert > 1 else tree.hosts,
        "pipeline": depth(pods(range(first, first + replica)) for first in range(0, sizes.world, replica))
        if sizes.pipeline > 1
        else tree.hosts,
        "engine": tree.depth[tree.meeting(set(leaves))],
    }
