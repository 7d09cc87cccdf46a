"""Free and total GPUs of every domain, kept up to date along the path of a change."""

from collections.abc import Iterable, Sequence

from rolloutfleet_operator.plan.placement.tree import Tree


class Room:
    """Counts by domain number. A domain is *whole* while nobody holds any GPU of its usable nodes."""

    __slots__ = ("free", "parent", "total", "tree")

    def __init__(self, tree: Tree, free: list[int] | None = None, total: list[int] | None = None) -> None:
        self.tree = tree
        self.parent = tree.parent
        if free is not None and total is not None:
            self.free, self.total = free, total
            return
        size = len(tree.parent)
        self.free, self.total = [0] * size, [0] * size
        for domain, node in tree.node_at.items():
            if node.usable:
                self.free[domain], self.total[domain] = node.free, node.gpus
        for domain in range(size - 1, 0, -1):
            above = self.parent[domain]
            self.free[above] += self.free[domain]
            self.total[above] += self.total[domain]

    def copy(self) -> "Room":
        """The same counts, to try something with."""
        return Room(self.tree, list(self.free), self.total)

    def take(self, leaf: int, gpus: int) -> None:
        """GPUs of a node are held from now on; negative ones are given back."""
        free, parent = self.free, self.parent
        domain = leaf
        while domain:
            free[domain] -= gpus
            domain = parent[domain]
        free[0] -= gpus

    def take_all(self, leaves: Iterable[int], gpus: int) -> None:
        """The same on several nodes."""
        for leaf in leaves:
            self.take(leaf, gpus)

    def whole(self, domain: int) -> bool:
        """Whether it has GPUs and nobody holds any."""
        return self.free[domain] == self.total[domain] > 0

    def whole_gpus(self) -> tuple[int, ...]:
        """For each level, widest first, the GPUs that lie in whole domains."""
        free, total, depth = self.free, self.total, self.tree.depth
        sums = [0] * (self.tree.hosts + 1)
        for domain in range(1, len(free)):
            if free[domain] == total[domain]:
                sums[depth[domain]] += total[domain]
        return tuple(sums[1:])


def restore(room: Room, free: Sequence[int]) -> None:
    """Put the counts back to those of a copy."""
    room.free[:] = free
