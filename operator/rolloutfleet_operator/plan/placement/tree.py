"""The domain tree: node labels -> nested domains, numbered so that a domain's number comes before those of everything inside it.

Depth 0 is the whole cluster, each level adds one, the last depth is single nodes. A node that lacks a level's label is in no domain with
others there: at that level it is alone with whatever finer domain it is known to be in. So an unlabelled node harms nobody, and can still
hold what fits into its own finer domain.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rolloutfleet_operator.plan.placement.nodes import NodeFacts, natural

CLUSTER = "cluster"
NodeIndex = int


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of domain, and the label whose value names a node's."""

    name: str
    label: str


HOST = Level("host", "kubernetes.io/hostname")
DEFAULT_LEVELS = (
    Level("zone", "topology.kubernetes.io/zone"),
    Level("block", "network.topology.nvidia.com/spine"),
    Level("rack", "network.topology.nvidia.com/leaf"),
    Level("nvlink", "nvidia.com/gpu.clique"),
    HOST,
)
"""Widest first."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Domains as parallel sequences, indexed by a domain's number; 0 is the cluster."""

    levels: tuple[Level, ...]
    """Those that at least one node carries; the last one is single nodes."""
    unused: tuple[Level, ...]
    """Those that no node carries."""
    depths: Mapping[str, int]
    """Level -> depth; a level that no node carries has the depth of the next finer one that is carried."""
    unlabelled: Mapping[str, tuple[str, ...]]
    """Level -> nodes without its label, for levels that others carry."""
    parent: Sequence[int]
    depth: Sequence[int]
    names: Sequence[str]
    known: Sequence[bool]
    """Whether the domain stands for a label's value, and not for a node that lacks it."""
    children: Sequence[Sequence[int]]
    nodes: tuple[NodeFacts, ...]
    leaf: Mapping[str, int]
    """Node name -> its domain, which is the node alone."""
    node_at: Mapping[int, NodeFacts]

    @property
    def hosts(self) -> int:
        """The depth of single nodes."""
        return len(self.levels)

    def level_name(self, depth: int) -> str:
        """The name of the level at a depth."""
        return self.levels[depth - 1].name if depth else CLUSTER

    def ancestor(self, domain: int, depth: int) -> int:
        """The domain at a depth, not below the given domain's, that the given one lies in."""
        while self.depth[domain] > depth:
            domain = self.parent[domain]
        return domain

    def meeting(self, domains: Iterable[int]) -> int:
        """The narrowest domain that holds all the given ones, of which there is at least one."""
        found = -1
        for domain in domains:
            if found < 0:
                found = domain
                continue
            other = self.ancestor(domain, self.depth[found])
            found = self.ancestor(found, self.depth[other])
            while found != other:
                found, other = self.parent[found], self.parent[other]
        return found

    def path(self, domain: int) -> tuple[int, ...]:
        """The domain and all that it lies in, up to but without the cluster, widest first."""
        found = []
        while domain:
            found.append(domain)
            domain = self.parent[domain]
        return tuple(reversed(found))

    def home(self, leaf: int) -> int:
        """The narrowest domain above a single node that stands for a label's value; the cluster when none does."""
        domain = self.parent[leaf]
        while not self.known[domain]:
            domain = self.parent[domain]
        return domain

    def at_depth(self, depth: int, within: int = 0) -> list[int]:
        """The domains of a depth inside a domain, in order."""
        found = [within]
        while found and self.depth[found[0]] < depth:
            found = [child for domain in found for child in self.children[domain]]
        return found

    def inside(self, domain: int) -> range:
        """The numbers of a domain and of everything in it."""
        last = domain
        while self.children[last]:
            last = self.children[last][-1]
        return range(domain, last + 1)

    def leaves(self, within: int = 0) -> list[int]:
        """The single nodes inside a domain, in order."""
        return self.at_depth(self.hosts, within)

    def title(self, domain: int) -> str:
        """A domain in words, such as ``rack r3``."""
        if not domain:
            return "the cluster"
        level = self.level_name(self.depth[domain])
        name = self.names[domain]
        if self.depth[domain] == self.hosts:
            return f"node {name}"
        return f"{level} {name}" if self.known[domain] else f"unlabelled {level} of {name}"


def build_tree(nodes: Iterable[NodeFacts], levels: Sequence[Level] = DEFAULT_LEVELS) -> Tree:
    """The tree of the nodes, the same for any order of them.

    Args:
        nodes: of different names.
        levels: widest first; single nodes are added when the last one is not :data:`HOST`'s.

    Raises:
        ValueError: two nodes have one name, or two levels one name or label.
    """
    wanted = tuple(level for level in levels if level.label != HOST.label)
    host = next((level for level in levels if level.label == HOST.label), HOST)
    for attribute in ("name", "label"):
        values = sorted(getattr(level, attribute) for level in (*wanted, host))
        if twice := [left for left, right in pairwise(values) if left == right]:
            raise ValueError(f"placement.levels: the {attribute} {twice[0]!r} is given twice")
    listed = sorted(nodes, key=lambda node: node.name)
    for before, after in pairwise(listed):
        if before.name == after.name:
            raise ValueError(f"node {after.name} is listed twice")
    return _Builder(listed, (*wanted, host)).build()


class _Builder:
    def __init__(self, nodes: list[NodeFacts], levels: tuple[Level, ...]) -> None:
        self._nodes = nodes
        carried = [any(node.labels.get(level.label) for node in nodes) for level in levels[:-1]] + [True]
        self._levels = tuple(level for level, used in zip(levels, carried, strict=True) if used)
        self._unused = tuple(level for level, used in zip(levels, carried, strict=True) if not used)
        self._depths = {CLUSTER: 0}
        for position, level in enumerate(levels):
            self._depths[level.name] = 1 + sum(carried[:position])
        self._sort_keys: dict[str, tuple[tuple[int, int, str], ...]] = {}

    def _natural(self, value: str) -> tuple[tuple[int, int, str], ...]:
        if value not in self._sort_keys:
            self._sort_keys[value] = natural(value)
        return self._sort_keys[value]

    def _steps(self, node: NodeFacts) -> list[tuple[bool, str]]:
        """For each level whether the node is labelled, and the name of its domain: a value, or that of the finer domain."""
        steps: list[tuple[bool, str]] = [(True, node.name)]
        for level in reversed(self._levels[:-1]):
            value = node.labels.get(level.label, "")
            steps.append((True, value) if value else (False, steps[-1][1]))
        return steps[::-1]

    def build(self) -> Tree:
        rows = []
        for node in self._nodes:
            steps = self._steps(node)
            # Unlabelled domains come last among their siblings.
            rows.append(([(not known, self._natural(name), name) for known, name in steps], steps, node))
        rows.sort(key=lambda row: row[0])
        parent, depth, names, known = [0], [0], [CLUSTER], [True]
        children: list[list[int]] = [[]]
        leaf, node_at = {}, {}
        open_path: list[int] = []
        open_steps: list[tuple[bool, str]] = []
        for _, steps, node in rows:
            shared = 0
            while shared < len(open_steps) - 1 and open_steps[shared] == steps[shared]:
                shared += 1
            del open_path[shared:]
            for position in range(shared, len(steps)):
                number = len(parent)
                above = open_path[-1] if open_path else 0
                parent.append(above)
                depth.append(position + 1)
                known.append(steps[position][0])
                names.append(steps[position][1])
                children.append([])
                children[above].append(number)
                open_path.append(number)
            open_steps = steps
            leaf[node.name] = open_path[-1]
            node_at[open_path[-1]] = node
        unlabelled = {}
        for level in self._levels[:-1]:
            if missing := [node.name for node in self._nodes if not node.labels.get(level.label)]:
                unlabelled[level.name] = tuple(sorted(missing, key=natural))
        ordered = tuple(node_at[number] for number in sorted(node_at))
        return Tree(
            levels=self._levels,
            unused=self._unused,
            depths=self._depths,
            unlabelled=unlabelled,
            parent=parent,
            depth=depth,
            names=names,
            known=known,
            children=children,
            nodes=ordered,
            leaf=leaf,
            node_at=node_at,
        )
