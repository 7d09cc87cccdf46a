"""An upper bound on the engines that can fit, cheap and never too low: what is above it is certain not to fit."""

from collections.abc import Sequence
from dataclasses import replace

from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.supply import Kind
from rolloutfleet_operator.plan.placement.task import Task


def most_engines(room: Room, task: Task, within: int, enough: int) -> int:
    """At most so many more engines of the fleet fit into a domain, as far as one can tell without trying; never above ``enough``."""
    by_product: dict[str, list[Kind]] = {}
    for kind in task.kinds(task.constraints.loosest):
        by_product.setdefault(kind.product, []).append(kind)
    return min(enough, sum(_most_of_product(room, kinds, within, enough) for kinds in by_product.values()))


def _most_of_product(room: Room, kinds: Sequence[Kind], within: int, enough: int) -> int:
    if len(kinds) == 1:
        return _most_of_kind(room, kinds[0], within, enough)
    tree = room.tree
    depth = max(min(kind.bounds.engine for kind in kinds), tree.depth[within])
    by_domain: dict[int, list[int]] = {}
    for leaf in kinds[0].inside(tree.inside(within)):
        if room.free[leaf]:
            by_domain.setdefault(tree.ancestor(leaf, depth), []).append(leaf)
    return min(enough, sum(_most_of_shapes(room, kinds, each, by_domain[each], enough) for each in by_domain))


def _most_of_shapes(room: Room, kinds: Sequence[Kind], domain: int, leaves: list[int], enough: int) -> int:
    """Of several shapes in one domain that may hold an engine of any of them."""
    free = [room.free[leaf] for leaf in leaves]
    usable = [kind for kind in kinds if sum(gpus >= kind.shape.gpus for gpus in free) >= kind.shape.pods]
    if len(usable) == 1:
        return _most_of_kind(room, replace(usable[0], leaves=tuple(leaves)), domain, enough)
    # Shapes may be mixed, so no shape's own bound holds: engines are counted by their GPUs, with the smallest pods that there are.
    small = min((kind.shape.gpus for kind in usable), default=0)
    return sum(gpus // small * small for gpus in free) // (usable[0].shape.pods * usable[0].shape.gpus) if small else 0


def _most_of_kind(room: Room, kind: Kind, within: int, enough: int) -> int:
    tree, shape = room.tree, kind.shape
    top = tree.depth[within]
    leaves = kind.inside(tree.inside(within))
    slots: dict[int, list[int]] = {}
    units: dict[int, int] = {}
    for leaf in leaves:
        if pods := room.free[leaf] // shape.gpus:
            slots.setdefault(tree.ancestor(leaf, max(kind.bounds.tensor, top)), []).append(pods)
    for domain, pods_by_node in slots.items():
        units[domain] = gangs(pods_by_node, shape.tensor_pods)
    for depth, per in ((kind.bounds.middle, shape.middle_tensors), (kind.bounds.engine, shape.middles)):
        wider: dict[int, int] = {}
        for domain, have in units.items():
            above = tree.ancestor(domain, max(depth, top))
            wider[above] = wider.get(above, 0) + have
        units = {domain: have // per for domain, have in wider.items()}
    if kind.bounds.tensor == kind.bounds.engine or shape.tensor_pods == 1:
        # Pods of one engine are on different nodes, which counts where nodes hold several pods.
        by_engine: dict[int, list[int]] = {}
        for leaf in leaves:
            if pods := room.free[leaf] // shape.gpus:
                by_engine.setdefault(tree.ancestor(leaf, max(kind.bounds.engine, top)), []).append(pods)
        units = {domain: min(have, gangs(by_engine.get(domain, []), shape.pods)) for domain, have in units.items()}
    return min(enough, sum(units.values()))


def gangs(slots: Sequence[int], size: int) -> int:
    """The most groups of ``size`` pods on different nodes, given the pods that each node can hold: exact.

    q groups exist exactly when the nodes, each counted with at most q pods, hold q x size.
    """
    low, high = 0, sum(slots) // size
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(each, middle) for each in slots) >= middle * size:
            low = middle
        else:
            high = middle - 1
    return low
