"""One fleet's share of the problem: its constraints in terms of the tree, and the pods that each kind of node could hold."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from rolloutfleet_operator.plan.placement.constraints import Bounds, Constraints, attained_depths, read_constraints
from rolloutfleet_operator.plan.placement.request import PlacementRequest
from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.shape import Shape, shapes_for
from rolloutfleet_operator.plan.placement.supply import Kind
from rolloutfleet_operator.plan.placement.tree import Tree


@dataclass(frozen=True, slots=True)
class Seat:
    """The nodes of one engine, in order of its ranks."""

    leaves: tuple[int, ...]
    gpus: int
    """Of each pod."""


@dataclass(frozen=True, slots=True)
class Task:
    """A fleet to be placed."""

    tree: Tree
    request: PlacementRequest
    constraints: Constraints
    products: Mapping[str, tuple[int, ...]]
    """The nodes whose labels and taints admit the fleet's pods, in order, by the kind of their GPUs: an engine keeps to one kind."""
    largest: Mapping[str, int]
    """The most GPUs of a node of each kind."""

    @property
    def world(self) -> int:
        """GPUs of one engine."""
        return self.request.parallelism.world

    def kinds(self, bounds: Bounds) -> tuple[Kind, ...]:
        """What can keep the bounds, those of the fewest pods first."""
        hosts = self.tree.hosts
        found = [
            Kind(product, shape, bounds.narrowed(shape, hosts), leaves)
            for product, leaves in self.products.items()
            for shape in self._shapes(product, bounds)
            if bounds.allows(shape, hosts)
        ]
        return tuple(sorted(found, key=lambda kind: (kind.shape.pods, kind.product)))

    def _shapes(self, product: str, bounds: Bounds) -> tuple[Shape, ...]:
        return shapes_for(
            self.request.parallelism, (self.largest[product],), bounds.nesting, self.request.gpus_per_node
        )

    def steps(self, within: int, *, preferring: bool) -> Iterator[tuple[Kind, ...]]:
        """Kinds to try, best first; those of one step are equally good but for where they would land.

        Args:
            within: the domain that holds the fleet.
            preferring: whether preferences count; else what is required is all that is tried.
        """
        seen: set[Kind] = set()
        for bounds in self.constraints.tries() if preferring else (self.constraints.loosest,):
            for _, kinds in groupby(
                self.kinds(bounds.inside(self.tree.depth[within])), key=lambda kind: kind.shape.pods
            ):
                fresh = tuple(kind for kind in kinds if kind not in seen)
                seen.update(fresh)
                if fresh:
                    yield fresh

    def seat(self, kind: Kind, leaves: list[int]) -> Seat:
        """Leaves listed by middle unit -> in order of ranks."""
        return Seat(tuple(leaves[place] for place in kind.shape.pod_order()), kind.shape.gpus)

    def attained(self, seat: Seat) -> dict[str, int]:
        """For each axis the depth of the domains that hold it."""
        return attained_depths(self.tree, self.request.parallelism, seat.gpus, seat.leaves)

    def missed(self, seat: Seat) -> tuple[int, ...]:
        """For each axis, in order of care, the levels by which the seat is wider than preferred."""
        return self.constraints.missed(self.attained(seat))


def could_hold(kind: Kind, room: Room, within: int) -> bool:
    """Whether a quick look leaves hope: a domain with enough free GPUs, and enough nodes with room for a pod."""
    depth = max(kind.bounds.engine, room.tree.depth[within])
    need = kind.shape.pods * kind.shape.gpus
    free, gpus = room.free, kind.shape.gpus
    if not any(free[domain] >= need for domain in room.tree.at_depth(depth, within)):
        return False
    wanted = kind.shape.pods
    for leaf in kind.inside(room.tree.inside(within)):
        if free[leaf] >= gpus:
            wanted -= 1
            if not wanted:
                return True
    return False


def make_task(tree: Tree, request: PlacementRequest) -> Task:
    """The fleet in terms of the tree; raises InvalidSpecError as :func:`read_constraints` does."""
    products: dict[str, list[int]] = {}
    admitted: dict[tuple[object, ...], bool] = {}
    rules = request.nodes
    simple = not rules.selector and rules.terms is None
    for leaf, node in tree.node_at.items():
        if node.gpus <= 0:
            continue
        if simple:
            if node.taints not in admitted:
                admitted[node.taints] = rules.admits(node)
            fits = admitted[node.taints]
        else:
            fits = rules.admits(node)
        if fits:
            products.setdefault(node.product, []).append(leaf)
    return Task(
        tree=tree,
        request=request,
        constraints=read_constraints(request, tree),
        products={name: tuple(products[name]) for name in sorted(products)},
        largest={name: max(tree.node_at[leaf].gpus for leaf in leaves) for name, leaves in products.items()},
    )
