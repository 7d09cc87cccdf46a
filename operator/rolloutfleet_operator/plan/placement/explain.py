"""Why an engine has no place, and what would give it one."""

from collections.abc import Iterator, Sequence
from itertools import islice

from rolloutfleet_operator.plan.placement.room import Room
from rolloutfleet_operator.plan.placement.supply import Fit, Kind, Supply
from rolloutfleet_operator.plan.placement.task import Task
from rolloutfleet_operator.plan.placement.tree import Tree

_NAMED = 3
_PODS = 8
_DOMAINS = 8
"""Domains for a whole fleet in which remedies are tried."""
_NOUNS = frozenset({"zone", "region", "block", "rack", "row", "room"})
_TRIED = 5000
"""Pods and nodes that are tried as remedies."""


def impossible(task: Task) -> str:
    """Why not one engine would fit if the nodes that admit it were all empty and open; empty when one would."""
    tree, sizes, request = task.tree, task.request.parallelism, task.request
    room = Room(tree, [0] * len(tree.parent), [0] * len(tree.parent))
    for leaf, node in tree.node_at.items():
        room.take(leaf, -node.gpus)
    kinds = task.kinds(task.constraints.loosest)
    if any(_fits(room, kind, within) for kind in kinds for within in _tops(task)):
        return ""
    if not task.products:
        return (
            f"no node with {request.gpu_resource} admits the fleet's pods"
            + (f": {why}" if (why := _refusals(task)) else "")
            + f"; an engine needs {sizes.world} GPUs ({sizes})"
        )
    sizes_here = [
        (tree.node_at[leaf].gpus, tree.node_at[leaf].name) for each in task.products.values() for leaf in each
    ]
    largest, name = min(sizes_here, key=lambda pair: (-pair[0], pair[1]))
    if not kinds:
        bounds = task.constraints.loosest
        level = tree.level_name(bounds.tensor)
        unit = sizes.world if sizes.world == sizes.tensor else sizes.tensor
        return (
            f"a tensor group of {unit} GPUs (parallelism.tensor {sizes.tensor}) must be in one {domain_word(level)}, and the largest "
            f"node has {largest} (node {name}): no number of GPUs per node divides {sizes} evenly under that rule; lower "
            "parallelism.tensor, or allow a wider level in placement.tensor.required"
        )
    need = _need(task, kinds[0])
    total = [(room.free[domain], domain) for domain in _engine_domains(task, kinds[0])]
    most, where = min(total, key=lambda pair: (-pair[0], pair[1]))
    return (
        f"an engine needs {need}, and the largest {_word(tree, kinds[0])} has {most} GPUs in all ({tree.title(where)}, largest node "
        f"{largest}); lower parallelism, or allow a wider level"
    )


def explain_missing(room: Room, task: Task, missing: Sequence[int], within: Sequence[int], *, searched: bool) -> str:
    """What is missing and what would make it fit.

    Args:
        room: with everything that has a place.
        task: the fleet.
        missing: its engines without one.
        within: the domains that may hold them.
        searched: whether it is certain that they do not fit.
    """
    tree, total = task.tree, task.request.replicas
    kinds = task.kinds(task.constraints.loosest)
    begin = f"{total - len(missing)} of {total} engines placed"
    if not kinds:
        return begin
    kind = kinds[0]
    best, domain = max(
        ((_usable(room, kind, each), -each) for top in within for each in _inside(task, kind, top)),
        default=(0, 0),
    )
    words = [f"{begin}; engine {missing[0]} needs {_need(task, kind)}, largest free is {best} ({tree.title(-domain)})"]
    if not searched:
        words.append("the search ended before it had looked at every arrangement")
    remedies = list(islice(_remedies(room, task, kinds, within), _NAMED)) or _several(room, task, kind, within)
    more = f"room for {len(missing)} engine{'s' if len(missing) > 1 else ''} of {task.world} GPUs is missing"
    words.append(
        " or ".join(remedies) + " would do" + (" for one of them" if len(missing) > 1 else "") if remedies else more
    )
    words += _alone(room, task, kind)
    return "; ".join(words)


def _remedies(room: Room, task: Task, kinds: Sequence[Kind], tops: Sequence[int]) -> Iterator[str]:
    """Single steps that would give one more engine a place, cheapest first."""
    tree = task.tree
    supplies = [(kind, within, Supply(room, kind, within, Fit.WHOLE)) for kind in kinds for within in tops[:_DOMAINS]]

    def would(leaf: int, gpus: int) -> bool:
        room.take(leaf, -gpus)
        for _, _, supply in supplies:
            supply.refresh(leaf)
        fits = any(supply.best(within) is not None for _, within, supply in supplies)
        room.take(leaf, gpus)
        for _, _, supply in supplies:
            supply.refresh(leaf)
        return fits

    if any(supply.best(within) is not None for _, within, supply in supplies):
        return
    admitted = {leaf for leaves in task.products.values() for leaf in leaves}
    closed = [leaf for leaf, node in tree.node_at.items() if leaf in admitted and not node.usable]
    for leaf in sorted(closed):
        node = tree.node_at[leaf]
        if would(leaf, max(0, node.gpus - node.used_by_others)):
            yield f"opening node {node.name} ({node.closed_because})"
    pods = [
        (pod.gpus, pod.name, leaf)
        for leaf, node in tree.node_at.items()
        if leaf in admitted and node.usable
        for pod in node.others
        if pod.gpus
    ]
    for gpus, name, leaf in sorted(pods)[:_TRIED]:
        if would(leaf, gpus):
            yield f"draining pod {name} ({gpus} GPUs on node {tree.node_at[leaf].name})"
    held = [
        (node.used_by_others, leaf)
        for leaf, node in tree.node_at.items()
        if leaf in admitted and node.usable and len(node.others) > 1
    ]
    for gpus, leaf in sorted(held)[:_TRIED]:
        if would(leaf, gpus):
            yield f"draining node {tree.node_at[leaf].name} of others' {gpus} GPUs"


def _several(room: Room, task: Task, kind: Kind, tops: Sequence[int]) -> list[str]:
    """The pods of others in one domain whose going would make room for one more engine, those that hold the fewest GPUs."""
    tree, gpus, best = task.tree, kind.shape.gpus, None
    for within in tops:
        by_domain: dict[int, list[tuple[int, int, int, list[str]]]] = {}
        for leaf in kind.inside(tree.inside(within)):
            node = tree.node_at[leaf]
            if not node.usable:
                continue
            free, going, lost = room.free[leaf], list[str](), 0
            for pod in sorted(node.others, key=lambda pod: (pod.gpus, pod.name)):
                if free >= gpus:
                    break
                free, lost = free + pod.gpus, lost + pod.gpus
                going.append(pod.name)
            if free >= gpus:
                domain = tree.ancestor(leaf, max(kind.bounds.engine, tree.depth[within]))
                by_domain.setdefault(domain, []).append((len(going), lost, leaf, going))
        for domain, choices in by_domain.items():
            chosen = sorted(choices)[: kind.shape.pods]
            cost = (sum(choice[1] for choice in chosen), sum(choice[0] for choice in chosen), domain)
            if (
                len(chosen) == kind.shape.pods
                and (best is None or cost < best[0])
                and _would_fit(room, kind, domain, chosen)
            ):
                best = (cost, sorted(name for choice in chosen for name in choice[3]))
    return [f"draining pods {', '.join(best[1])}"] if best and 0 < len(best[1]) <= _PODS else []


def _would_fit(room: Room, kind: Kind, domain: int, chosen: Sequence[tuple[int, int, int, list[str]]]) -> bool:
    """Whether an engine fits once the chosen nodes have lost those pods."""
    emptied = room.copy()
    for _, gpus, leaf, _ in chosen:
        emptied.take(leaf, -gpus)
    return _fits(emptied, kind, domain)


def _alone(room: Room, task: Task, kind: Kind) -> list[str]:
    """Nodes with room that are left out of wider domains because they lack a label."""
    tree, depth = task.tree, kind.bounds.engine
    if not 0 < depth < tree.hosts:
        return []
    level = tree.levels[depth - 1]
    names = [name for name in tree.unlabelled.get(level.name, ()) if room.free[tree.leaf[name]] >= kind.shape.gpus]
    if not names:
        return []
    return [f"{level.label} is not on {len(names)} of the nodes with room, such as {names[0]}, so each counts alone"]


def _tops(task: Task) -> list[int]:
    return task.tree.at_depth(task.constraints.ladders["fleet"].required)


def _inside(task: Task, kind: Kind, within: int) -> list[int]:
    tree = task.tree
    return tree.at_depth(max(kind.bounds.engine, tree.depth[within]), within)


def _engine_domains(task: Task, kind: Kind) -> list[int]:
    return task.tree.at_depth(kind.bounds.engine)


def _fits(room: Room, kind: Kind, within: int) -> bool:
    return Supply(room, kind, within, Fit.WHOLE).best(within) is not None


def _usable(room: Room, kind: Kind, domain: int) -> int:
    """GPUs that pods of the kind could take in a domain, one pod a node."""
    tree, gpus = room.tree, kind.shape.gpus
    if domain in tree.node_at:
        return room.free[domain]
    return sum(gpus for leaf in tree.leaves(domain) if room.free[leaf] >= gpus)


def _word(tree: Tree, kind: Kind) -> str:
    depth = kind.bounds.engine
    return "node" if depth == tree.hosts else domain_word(tree.level_name(depth))


def domain_word(level: str) -> str:
    """A domain of a level in words: racks are called racks, and what is no noun is called a domain."""
    return level if level in _NOUNS else f"{level} domain"


def _need(task: Task, kind: Kind) -> str:
    """What an engine needs, in words."""
    shape, tree = kind.shape, task.tree
    where = f"on one {_word(tree, kind)}" if kind.bounds.engine == tree.hosts else f"in one {_word(tree, kind)}"
    if not kind.bounds.engine:
        where = "in the cluster"
    if shape.pods == 1:
        return f"{shape.gpus} GPUs {where}"
    words = f"{shape.pods * shape.gpus} GPUs {where}, {shape.gpus} on each of {shape.pods} nodes"
    if shape.middle_pods > 1 and kind.bounds.middle > kind.bounds.engine:
        words += f", each {shape.middle_pods} of them in one {domain_word(tree.level_name(kind.bounds.middle))}"
    if shape.tensor_pods > 1 and kind.bounds.tensor > kind.bounds.middle:
        words += f", tensor groups of {shape.tensor_pods} in one {domain_word(tree.level_name(kind.bounds.tensor))}"
    return words


def _refusals(task: Task) -> str:
    rules, reasons = task.request.nodes, dict[str, str]()
    for node in task.tree.nodes:
        if node.gpus:
            reasons.setdefault(rules.refusal(node), node.name)
    return ", ".join(f"{why} (node {name})" for why, name in sorted(reasons.items())[:_NAMED])


def note_nodes(tree: Tree) -> tuple[str, ...]:
    """What stands out about nodes and levels."""
    notes = [f"no node carries {level.label}, so the level {level.name} is not there" for level in tree.unused]
    for level in tree.levels[:-1]:
        if names := tree.unlabelled.get(level.name):
            shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            notes.append(
                f"without {level.label}, {len(names)} of {len(tree.nodes)} nodes count as a {level.name} of their own each: {shown}"
            )
    closed = [node for node in tree.nodes if node.gpus and not node.usable]
    return (*notes, *(f"node {node.name} takes no new pods: {node.closed_because}" for node in closed))
