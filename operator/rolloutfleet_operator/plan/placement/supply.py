"""For one shape under given bounds: how many units fit into each domain, and which domain is the best fit, without a second look.

Both are kept along the path of each change. A key is a tuple whose least is the best; what a wider domain adds to it is the same for all
domains inside, so the best of the whole is the best of the bests, and each domain needs to know that of its children alone.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush, nsmallest

from rolloutfleet_operator.plan.placement.constraints import Bounds
from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.shape import Shape

Key = tuple[int, ...]
_FEW = 64
"""Nodes of one domain that are sorted anew for each engine; more are kept in a heap."""


class Fit(StrEnum):
    """How to choose among domains that hold an engine."""

    WHOLE = "Whole"
    """Spare whole domains first, then leave the smallest rest."""
    TIGHT = "Tight"
    """Leave the smallest rest first."""
    LEVEL = "Level"
    """Take from the nodes with most room, so that as many as possible keep some: best where pods share nodes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Pods of one shape, on the nodes of one product that a fleet may use."""

    product: str
    shape: Shape
    bounds: Bounds
    """As narrow as the shape allows."""
    leaves: tuple[int, ...]
    """In order."""

    def inside(self, numbers: range) -> Sequence[int]:
        """Those of a domain, given the numbers of what is in it."""
        return self.leaves[bisect_left(self.leaves, numbers.start) : bisect_left(self.leaves, numbers.stop)]


class Supply:
    """What there is for one kind inside a domain; tell it of every change with :meth:`refresh`."""

    __slots__ = (
        "_admitted",
        "_best",
        "_count",
        "_fit",
        "_heaps",
        "_hosts",
        "_per",
        "_room",
        "_top",
        "_wide",
        "depth",
        "kind",
    )

    def __init__(self, room: Room, kind: Kind, within: int, fit: Fit) -> None:
        tree = room.tree
        self._room, self._fit, self._top, self.kind = room, fit, within, kind
        self.depth, self._hosts = max(kind.bounds.engine, tree.depth[within]), tree.hosts
        self._per = [1] * (tree.hosts + 1)
        """Units below that make one unit, by depth."""
        self._per[kind.bounds.tensor] *= kind.shape.tensor_pods
        self._per[kind.bounds.middle] *= kind.shape.middle_tensors
        size = len(tree.parent)
        self._admitted = bytearray(size)
        self._count: list[int] = [0] * size
        self._best: list[Key | None] = [None] * size
        self._heaps: dict[int, list[tuple[Key, int]]] = {}
        self._wide: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        gpus, parent, depth = kind.shape.gpus, tree.parent, tree.depth
        touched: set[int] = set()
        for leaf in kind.inside(tree.inside(within)):
            self._admitted[leaf] = 1
            touched.add(leaf)
            if room.free[leaf] >= gpus:
                self._count[leaf] = 1
        for at in range(tree.hosts, depth[within], -1):
            above = set()
            for domain in touched:
                if at != tree.hosts:
                    self._count[domain] //= self._per[at]
                self._count[parent[domain]] += self._count[domain]
                above.add(parent[domain])
            self._settle(touched, at)
            touched = above
        if depth[within] != tree.hosts:
            self._count[within] //= self._per[depth[within]]
        self._settle({within}, depth[within])

    def _settle(self, domains: set[int], at: int) -> None:
        """First keys of all domains of a depth."""
        if at > self.depth:
            return
        for domain in domains:
            if at == self.depth:
                self._best[domain] = self._own(domain)
                continue
            best = self._best
            heap = [(key, child) for child in self._room.tree.children[domain] if (key := best[child]) is not None]
            heapify(heap)
            self._heaps[domain] = heap
            self._best[domain] = self._wider(domain, heap[0][0]) if heap else None

    def _own(self, domain: int) -> Key | None:
        """The key of a domain that may hold one engine."""
        rest = self._count[domain] - self.kind.shape.middles
        if rest < 0 or not self._count[domain]:
            return None
        free = self._room.free[domain]
        broken = self._room.total[domain] if free == self._room.total[domain] else 0
        if self._fit is Fit.WHOLE:
            return (broken, rest, free, domain)
        if self._fit is Fit.TIGHT:
            return (rest, free, broken, domain)
        return (-free, -rest, broken, domain)

    def _wider(self, domain: int, key: Key) -> Key:
        free = self._room.free[domain]
        if self._fit is Fit.LEVEL:
            return (*key[:-1], -free, key[-1])
        broken = self._room.total[domain] if free == self._room.total[domain] else 0
        if self._fit is Fit.WHOLE:
            return (key[0] + broken, *key[1:-1], free, key[-1])
        return (*key[:2], key[2] + broken, *key[3:-1], free, key[-1])

    def best(self, within: int) -> Key | None:
        """The least key of any domain that holds one engine inside a domain; None when none does. Its last number is the domain."""
        return self._best[within]

    def holds(self, domain: int) -> int:
        """Units that fit into the domain: middle units where it is no narrower than one of those."""
        return self._count[domain]

    def refresh(self, leaf: int) -> None:
        """A node's free GPUs have changed."""
        if not self._admitted[leaf]:
            return
        room, counts, parent, depth = self._room, self._count, self._room.parent, self._room.tree.depth
        old, new = counts[leaf], int(room.free[leaf] >= self.kind.shape.gpus)
        counts[leaf] = new
        if new and parent[leaf] in self._wide:
            heappush(self._wide[parent[leaf]], (self._rank(leaf), leaf))
        domain = leaf
        while True:
            at = depth[domain]
            if at == self.depth:
                self._best[domain] = self._own(domain)
            elif at < self.depth:
                self._lift(domain)
            if domain == self._top:
                return
            above = parent[domain]
            if at <= self.depth and (key := self._best[domain]) is not None:
                heappush(self._heaps[above], (key, domain))
            domain = above
            if old != new:
                # Narrower counts are kept as quotients, so the sum is made anew where several make one.
                per = self._per[depth[domain]]
                before = counts[domain]
                if per == 1:
                    counts[domain] += new - old
                else:
                    counts[domain] = sum(counts[child] for child in room.tree.children[domain]) // per
                old, new = before, counts[domain]

    def _lift(self, domain: int) -> None:
        """The domain's key from the best of its children that still is what it was."""
        heap, best = self._heaps[domain], self._best
        while heap and best[heap[0][1]] != heap[0][0]:
            heappop(heap)
        best[domain] = self._wider(domain, heap[0][0]) if heap else None

    def pick(self, domain: int) -> list[int]:
        """Nodes for one engine in a domain that :meth:`best` named, listed by middle unit, each by tensor group; take them, and refresh."""
        return self._fill(domain, self.kind.shape.middles)

    def _fill(self, domain: int, units: int) -> list[int]:
        tree, room, counts = self._room.tree, self._room, self._count
        at = tree.depth[domain]
        if at == self._hosts:
            return [domain]
        inside = units * self._per[at]
        if at + 1 == self._hosts:
            return sorted(self._nodes(domain, inside))
        children = [child for child in tree.children[domain] if counts[child]]
        taken: dict[int, int] = {}
        while inside:
            enough = [child for child in children if counts[child] >= inside and child not in taken]
            if enough:
                chosen_child = min(
                    enough, key=lambda child: (*self._rank(child)[:1], counts[child], *self._rank(child))
                )
                taken[chosen_child] = inside
                break
            left = [child for child in children if child not in taken]
            chosen_child = min(left, key=lambda child: (room.whole(child), -counts[child], child))
            taken[chosen_child] = counts[chosen_child]
            inside -= counts[chosen_child]
        return [leaf for child in sorted(taken) for leaf in self._fill(child, taken[child])]

    def _nodes(self, domain: int, wanted: int) -> list[int]:
        """The nodes of a domain that are to be used up first; of many nodes the order is kept from one engine to the next."""
        children, counts = self._room.tree.children[domain], self._count
        if len(children) <= _FEW:
            return nsmallest(wanted, (leaf for leaf in children if counts[leaf]), key=self._rank)
        if domain not in self._wide:
            self._wide[domain] = [(self._rank(leaf), leaf) for leaf in children if counts[leaf]]
            heapify(self._wide[domain])
        heap, chosen = self._wide[domain], list[int]()
        while len(chosen) < wanted:
            rank, leaf = heappop(heap)
            if counts[leaf] and rank == self._rank(leaf) and leaf not in chosen:
                chosen.append(leaf)
        return chosen

    def _rank(self, domain: int) -> tuple[int, ...]:
        """Order in which domains inside the chosen one are used up."""
        free = self._room.free[domain]
        if self._fit is Fit.LEVEL:
            return (-free, domain)
        return (self._room.total[domain] if free == self._room.total[domain] else 0, free, domain)
