"""The optimum by OR-tools' CP-SAT, straight from the definition: ranks in pods, pods on nodes, each group of ranks in one domain."""

from collections.abc import Iterator
from dataclasses import dataclass

from ortools.sat.python import cp_model

from benchmarks.placement.instances import Case
from rolloutfleet_operator.plan.placement.request import PlacementRequest
from rolloutfleet_operator.plan.placement.tree import build_tree


@dataclass(frozen=True, slots=True)
class Optimum:
    """Engines that fit, then the fewest pods, then the GPUs left in whole domains, summed over levels."""

    engines: int
    pods: int
    whole: int
    proved: bool


def solve_exactly(case: Case, seconds: float = 20.0) -> Optimum:
    """The optimum of a case, or the best within the time with ``proved`` False."""
    return _Model(case).solve(seconds)


def pod_groups(request: PlacementRequest, gpus: int) -> dict[str, list[set[int]]]:
    """For each axis its groups as sets of pods, by writing out the ranks (data, pipeline, tensor; tensor fastest)."""
    sizes = request.parallelism
    rank = {
        (d, p, t): (d * sizes.pipeline + p) * sizes.tensor + t
        for d in range(sizes.data)
        for p in range(sizes.pipeline)
        for t in range(sizes.tensor)
    }
    groups: dict[str, dict[tuple[int, ...], set[int]]] = {
        axis: {} for axis in ("tensor", "pipeline", "expert", "engine")
    }
    for (d, p, _), number in rank.items():
        pod = number // gpus
        groups["tensor"].setdefault((d, p), set()).add(pod)
        if sizes.pipeline > 1:
            groups["pipeline"].setdefault((d,), set()).add(pod)
        if sizes.expert > 1:
            groups["expert"].setdefault((p,), set()).add(pod)
        groups["engine"].setdefault((), set()).add(pod)
    return {axis: list(sets.values()) for axis, sets in groups.items()}


def even_pods(request: PlacementRequest, most: int) -> Iterator[int]:
    """GPUs of a pod by which every tensor group and every replica is whole pods, or whole in a pod."""
    sizes, wanted = request.parallelism, request.gpus_per_node
    for gpus in range(1, sizes.world + 1) if wanted is None else (min(wanted, sizes.world),):
        units = (sizes.tensor, sizes.replica)
        if gpus <= most and sizes.world % gpus == 0 and all(gpus % unit == 0 or unit % gpus == 0 for unit in units):
            yield gpus


class _Model:
    def __init__(self, case: Case) -> None:
        self._model = cp_model.CpModel()
        self._tree = build_tree(case.nodes, case.requests[0].levels)
        self._used: dict[int, list[cp_model.LinearExprT]] = {leaf: [] for leaf in self._tree.leaves()}
        self._placed: list[cp_model.IntVar] = []
        self._pod_count: list[cp_model.LinearExprT] = []
        for request in case.requests:
            self._fleet(request)
        for leaf, used in self._used.items():
            self._model.add(sum(used) <= self._tree.node_at[leaf].free)

    def _fleet(self, request: PlacementRequest) -> None:
        tree, model = self._tree, self._model
        rule = request.rule("fleet").required
        depth = tree.depths[rule] if rule else 0
        homes = {domain: model.new_bool_var("") for domain in tree.at_depth(depth)}
        model.add_exactly_one(homes.values())
        before = None
        for _ in range(request.replicas):
            placed = self._engine(request, homes, depth)
            if before is not None:
                model.add_implication(placed, before)
            before = placed

    def _engine(self, request: PlacementRequest, homes: dict[int, cp_model.IntVar], depth: int) -> cp_model.IntVar:
        tree, model = self._tree, self._model
        placed = model.new_bool_var("")
        self._placed.append(placed)
        ways = []
        for product in sorted({node.product for node in tree.nodes}):
            leaves = [
                leaf
                for leaf, node in tree.node_at.items()
                if node.product == product and node.free and request.nodes.admits(node)
            ]
            for gpus in even_pods(request, max((tree.node_at[leaf].free for leaf in leaves), default=0)):
                chosen = model.new_bool_var("")
                ways.append(chosen)
                self._pod_count.append(chosen * (request.parallelism.world // gpus))
                self._pods(request, gpus, leaves, chosen, homes, depth)
        model.add(sum(ways) == placed)
        return placed

    def _pods(
        self,
        request: PlacementRequest,
        gpus: int,
        leaves: list[int],
        chosen: cp_model.IntVar,
        homes: dict[int, cp_model.IntVar],
        depth: int,
    ) -> None:
        tree, model = self._tree, self._model
        pods = request.parallelism.world // gpus
        at = {(pod, leaf): model.new_bool_var("") for pod in range(pods) for leaf in leaves}
        for pod in range(pods):
            model.add(sum(at[pod, leaf] for leaf in leaves) == chosen)
        for leaf in leaves:
            here = sum(at[pod, leaf] for pod in range(pods))
            model.add(here <= 1)
            self._used[leaf].append(here * gpus)
            home = homes[tree.ancestor(leaf, depth)]
            for pod in range(pods):
                model.add_implication(at[pod, leaf], home)
        for axis, groups in pod_groups(request, gpus).items():
            level = request.rule(axis).required
            domains: dict[int, list[int]] = {}
            for leaf in leaves:
                domains.setdefault(tree.ancestor(leaf, tree.depths[level]), []).append(leaf)
            for first, *rest in (sorted(group) for group in groups):
                for pod in rest:
                    for inside in domains.values():
                        model.add(sum(at[pod, leaf] for leaf in inside) == sum(at[first, leaf] for leaf in inside))

    def solve(self, seconds: float) -> Optimum:
        whole = self._whole()
        most = sum(node.gpus for node in self._tree.nodes) * (self._tree.hosts + 1) + 1
        most_pods = 1 + sum(node.gpus for node in self._tree.nodes)
        placed, pods = cp_model.LinearExpr.sum(self._placed), cp_model.LinearExpr.sum(self._pod_count)
        self._model.maximize(cp_model.LinearExpr.weighted_sum([placed, pods, whole], [most * most_pods, -most, 1]))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        status = solver.solve(self._model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return Optimum(
            engines=solver.value(placed),
            pods=solver.value(pods),
            whole=solver.value(whole),
            proved=status == cp_model.OPTIMAL,
        )

    def _whole(self) -> cp_model.LinearExprT:
        tree, model = self._tree, self._model
        terms: list[cp_model.LinearExprT] = []
        for domain in range(1, len(tree.parent)):
            usable = [leaf for leaf in tree.leaves(domain) if tree.node_at[leaf].usable]
            total = sum(tree.node_at[leaf].gpus for leaf in usable)
            if not total or any(tree.node_at[leaf].used_by_others for leaf in usable):
                continue
            whole = model.new_bool_var("")
            for leaf in usable:
                for used in self._used[leaf]:
                    model.add(used == 0).only_enforce_if(whole)
            terms.append(whole * total)
        return cp_model.LinearExpr.sum(terms)
