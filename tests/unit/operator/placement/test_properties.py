"""What holds for every plan, whatever is asked: judged from the definitions of ranks and groups, not by the planner's own arithmetic."""

from collections import Counter
from dataclasses import replace

from benchmarks.placement.exact import pod_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.placement.strategies import LEVELS, Situation, situations
from rolloutfleet_operator.plan.placement.nodes import NodeFacts
from rolloutfleet_operator.plan.placement.ranks import locate, plan_ranks
from rolloutfleet_operator.plan.placement.request import Placed, PlacementRequest
from rolloutfleet_operator.plan.placement.result import Plan, Verdict
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.solve import Limits, plan_placement

EXAMPLES = settings(max_examples=80, deadline=None)
QUICK = Limits(exact_steps=4000)
"""Enough to be used, few enough steps for many examples."""


def plan_of(situation: Situation, limits: Limits = QUICK) -> Plan:
    return plan_placement(situation.nodes, situation.requests, situation.placed, limits)


def stands(plan: Plan) -> list[Placed]:
    return [
        Placed(fleet.request.fleet, place.engine, place.nodes, place.gpus)
        for fleet in plan.fleets
        for place in fleet.engines
    ]


@given(situations(), st.integers(0, 9))
@EXAMPLES
def test_ranks_are_a_permutation_contiguous_on_each_node_and_tensor_fastest(situation, first):
    plan = plan_of(situation)
    for fleet in plan.fleets:
        sizes, pods = fleet.request.parallelism, plan_ranks(plan.tree, fleet, first)
        ranks = [rank for pod in pods for rank in pod.ranks]
        assert ranks == list(range(first, first + len(fleet.engines) * sizes.world))
        assert len(locate(pods)) == len(ranks)
        for place in fleet.engines:
            mine = [pod for pod in pods if pod.engine == place.engine]
            assert {pod.count for pod in mine} == {place.gpus}
            offset = mine[0].first
            at = {pod.first - offset + index: pod.node for pod in mine for index in range(pod.count)}
            # rank = (data x PP + pipeline) x TP + tensor: pod n of equal pods holds the n-th slice of it.
            assert [at[rank] for rank in range(sizes.world)] == [
                node for node in place.nodes for _ in range(place.gpus)
            ]


@given(situations())
@EXAMPLES
def test_every_axis_of_a_new_engine_is_inside_its_required_domain(situation):
    plan = plan_of(situation)
    tree = plan.tree
    for fleet in plan.fleets:
        request = fleet.request
        homes = set()
        for place in fleet.engines:
            for axis, groups in pod_groups(request, place.gpus).items():
                rule = request.rule(axis)
                level = rule.required or ("cluster" if axis != "tensor" else "")
                if axis == "tensor" and not level:
                    depth = min(tree.depths["nvlink"], tree.depths[rule.preferred] if rule.preferred else tree.hosts)
                else:
                    depth = tree.depths[level]
                for group in groups:
                    domains = {tree.ancestor(tree.leaf[place.nodes[pod]], depth) for pod in group}
                    assert len(domains) == 1, (axis, place)
            if wide := request.rule("fleet").required:
                homes |= {tree.ancestor(tree.leaf[node], tree.depths[wide]) for node in place.nodes}
        assert len(homes) <= 1


@given(situations())
@EXAMPLES
def test_no_node_holds_more_than_it_has_and_closed_ones_get_nothing_new(situation):
    plan = plan_of(situation)
    nodes = {node.name: node for node in situation.nodes}
    used: Counter[str] = Counter()
    for fleet in plan.fleets:
        for place in fleet.engines:
            assert len(set(place.nodes)) == len(place.nodes)
            assert len(place.nodes) * place.gpus == fleet.request.parallelism.world
            assert fleet.request.gpus_per_node in (None, place.gpus) or place.gpus == fleet.request.parallelism.world
            assert len({nodes[name].product for name in place.nodes}) == 1 or place.kept
            for name in place.nodes:
                used[name] += place.gpus
                assert place.kept or (nodes[name].usable and not nodes[name].taints)
                assert nodes[name].ready
    for name, gpus in used.items():
        assert gpus + nodes[name].used_by_others <= nodes[name].gpus


@given(situations(), st.randoms(use_true_random=False))
@EXAMPLES
def test_the_plan_is_the_same_for_any_order_of_what_is_given(situation, chance):
    shuffled = [list(each) for each in (situation.nodes, situation.requests, situation.placed)]
    for each in shuffled:
        chance.shuffle(each)
    relabelled = [replace(node, labels=dict(reversed(node.labels.items()))) for node in shuffled[0]]
    again = plan_placement(relabelled, shuffled[1], shuffled[2], QUICK)
    assert (again.fleets, again.score, again.notes) == ((first := plan_of(situation)).fleets, first.score, first.notes)


@given(situations())
@EXAMPLES
def test_planning_the_result_again_changes_nothing(situation):
    plan = plan_of(situation)
    again = plan_placement(situation.nodes, situation.requests, stands(plan), QUICK)
    for before, after in zip(plan.fleets, again.fleets, strict=True):
        assert not after.moved
        assert {place.engine: (place.nodes, place.gpus) for place in before.engines}.items() <= {
            place.engine: (place.nodes, place.gpus) for place in after.engines
        }.items()
        if before.verdict is not Verdict.NOT_FOUND:
            assert len(before.engines) == len(after.engines)


@given(situations())
@EXAMPLES
def test_every_engine_is_placed_or_missing_and_a_reason_is_given(situation):
    plan = plan_of(situation)
    for fleet in plan.fleets:
        engines = sorted([*(place.engine for place in fleet.engines), *fleet.missing])
        assert engines == list(range(fleet.request.replicas))
        assert bool(fleet.message) == bool(fleet.missing)
        assert (fleet.verdict is Verdict.PLACED) == (not fleet.missing)
        stood = {each.engine for each in situation.placed if each.fleet == fleet.request.fleet}
        stayed = {place.engine for place in fleet.engines if place.kept}
        assert {moved.engine for moved in fleet.moved} == {
            engine for engine in stood - stayed if engine < fleet.request.replicas
        }


@given(situations(), st.integers(1, 3))
@EXAMPLES
def test_more_engines_never_move_those_that_stand(situation, more):
    plan = plan_of(situation)
    wider = [replace(request, replicas=request.replicas + more) for request in situation.requests]
    again = plan_placement(situation.nodes, wider, stands(plan), QUICK)
    for before, after in zip(plan.fleets, again.fleets, strict=True):
        kept = {place.engine: place.nodes for place in after.engines if place.kept}
        assert kept == {place.engine: place.nodes for place in before.engines}


@given(st.integers(1, 4), st.integers(1, 12))
def test_spread_engines_differ_by_one_at_most_where_there_is_room(racks, engines):
    nodes = [
        NodeFacts(f"n{rack}{index}", 8, {"example.com/rack": f"r{rack}"})
        for rack in range(racks)
        for index in range(12)
    ]
    plan = plan_placement(nodes, [PlacementRequest("a", engines, Parallelism(8), LEVELS, spread="rack")])
    counts = Counter(place.nodes[0][1] for place in plan.fleets[0].engines)
    assert max(counts.values()) - min(counts[str(rack)] for rack in range(racks)) <= 1
