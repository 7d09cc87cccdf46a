"""Tables: small clusters whose best plan is plain to see."""

import pytest

from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement.nodes import PRODUCT_LABEL, NodeFacts, NodeRules, OtherPod, Taint, Toleration
from rolloutfleet_operator.plan.placement.request import Placed, PlacementRequest, Rule
from rolloutfleet_operator.plan.placement.result import Verdict
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.solve import Limits, plan_placement
from rolloutfleet_operator.plan.placement.tree import HOST, Level

LEVELS = (
    Level("block", "example.com/block"),
    Level("rack", "example.com/rack"),
    Level("nvlink", "example.com/clique"),
    HOST,
)


def node(
    name: str,
    rack: str = "",
    used: int = 0,
    *,
    gpus: int = 8,
    block: str = "",
    clique: str = "",
    product: str = "",
    **more,
):
    labels = {
        "example.com/block": block,
        "example.com/rack": rack,
        "example.com/clique": clique,
        PRODUCT_LABEL: product,
    }
    others = (OtherPod(f"x/{name}", used),) if used else ()
    return NodeFacts(name, gpus, {key: value for key, value in labels.items() if value}, others, **more)


def fleet(
    replicas: int = 1, tensor: int = 8, pipeline: int = 1, expert: int = 1, name: str = "a", **more
) -> PlacementRequest:
    rules = {
        axis: rule for axis in ("tensor", "expert", "pipeline", "engine", "fleet") if (rule := more.pop(axis, None))
    }
    return PlacementRequest(name, replicas, Parallelism(tensor, pipeline, expert), LEVELS, rules, **more)


def nodes_of(plan, index: int = 0) -> list[tuple[str, ...]]:
    return [place.nodes for place in plan.fleets[index].engines]


def test_the_smallest_sufficient_rest_is_used_first():
    plan = plan_placement([node("n1", "r1"), node("n2", "r1", 2), node("n3", "r2", 4)], [fleet(tensor=4)])
    assert nodes_of(plan) == [("n3",)]


@pytest.mark.parametrize("limits", [Limits(), Limits(several_nodes=0)])
def test_one_domain_of_many_nodes_is_filled_by_the_same_rules(limits):
    used = [node(f"n{index}", "r1", index % 5) for index in range(200)]
    plan = plan_placement(used, [fleet(100, tensor=4), fleet(20, tensor=8, name="b")], limits=limits)
    held = {each.name: each.used_by_others for each in used}
    assert plan.complete
    # Engines of four fill the nodes with exactly four left, then those with least more; the whole ones are for the engines of eight.
    assert [held[place.nodes[0]] for place in plan.fleets[0].engines] == [4] * 40 + [3] * 40 + [2] * 20
    assert {held[place.nodes[0]] for place in plan.fleets[1].engines} == {0}


def test_an_engine_of_many_pods_takes_its_nodes_out_of_one_domain_of_many():
    cluster = [node(f"n{index}", "r1", index % 3) for index in range(300)]
    plan = plan_placement(cluster, [fleet(12, tensor=4, pipeline=8, gpus_per_node=4, engine=Rule("rack"))])
    assert plan.complete
    assert all(len(set(place.nodes)) == 8 for place in plan.fleets[0].engines)


def test_a_rack_in_use_is_filled_before_a_whole_one_is_broken():
    cluster = [node("n1", "r1"), node("n2", "r1"), node("n3", "r2", 8), node("n4", "r2")]
    assert nodes_of(plan_placement(cluster, [fleet()])) == [("n4",)]


def test_an_engine_lies_in_the_narrowest_domain_that_holds_all_of_it():
    cluster = [node("n1", "r1"), node("n2", "r2"), node("n3", "r2"), node("n4", "r3")]
    assert nodes_of(plan_placement(cluster, [fleet(pipeline=2)])) == [("n2", "n3")]


def test_a_leader_is_not_put_where_its_followers_cannot_follow():
    # Both whole racks have a free node; only one has two.
    cluster = [node("n1", "r1"), node("n2", "r1", 8), node("n3", "r2"), node("n4", "r2")]
    plan = plan_placement(cluster, [fleet(pipeline=2, engine=Rule("rack"))])
    assert nodes_of(plan) == [("n3", "n4")]


def test_pods_have_as_many_gpus_as_is_asked_for():
    cluster = [node(f"n{i}", "r1", clique="c") for i in range(4)]
    plan = plan_placement(cluster, [fleet(1, gpus_per_node=2)])
    assert [(place.gpus, len(place.nodes)) for place in plan.fleets[0].engines] == [(2, 4)]
    again = plan_placement(cluster, [fleet(1, gpus_per_node=4)], [Placed("a", 0, ("n0", "n1", "n2", "n3"), 2)]).fleets[
        0
    ]
    assert again.moved[0].reason == "its pods have 2 GPUs each, and parallelism.gpusPerNode is 4"


def test_tensor_groups_keep_to_one_node_unless_there_are_nvlink_domains():
    hosts = [node("n1", "r1", gpus=4), node("n2", "r1", gpus=4)]
    refused = plan_placement(hosts, [fleet()]).fleets[0]
    assert refused.verdict is Verdict.IMPOSSIBLE
    assert "parallelism.tensor 8" in refused.message
    assert "4 (node n1)" in refused.message
    cliques = [node("n1", "r1", gpus=4, clique="c"), node("n2", "r1", gpus=4, clique="c")]
    assert nodes_of(plan_placement(cliques, [fleet()])) == [("n1", "n2")]


def test_each_kind_of_node_gets_its_own_shape_and_no_engine_mixes_kinds():
    cluster = [node("h1", "r1", product="H100")]
    cluster += [node(f"g{i}", "r2", gpus=4, clique="c", product="GB200") for i in range(4)]
    plan = plan_placement(cluster, [fleet(3)])
    assert [(place.nodes, place.gpus) for place in plan.fleets[0].engines] == [
        (("h1",), 8),
        (("g0", "g1"), 4),
        (("g2", "g3"), 4),
    ]


def test_expert_groups_and_pipelines_that_cross_are_both_kept():
    # TP 8, PP 2, DP 2: each stage of both replicas in one rack, the engine in one block.
    cluster = [node(f"n{i}", f"r{i // 2}", block=f"b{i // 4}") for i in range(8)]
    request = PlacementRequest(
        "a",
        1,
        Parallelism(8, 2, 16),
        LEVELS,
        {"expert": Rule("rack"), "pipeline": Rule("block"), "engine": Rule("cluster")},
    )
    (places,) = nodes_of(plan_placement(cluster, [request]))
    racks = [int(name[1:]) // 2 for name in places]
    # Ranks: replica 0 stage 0, replica 0 stage 1, replica 1 stage 0, replica 1 stage 1.
    assert racks[0] == racks[2] != racks[1] == racks[3]
    assert len({int(name[1:]) // 4 for name in places}) == 1


@pytest.mark.parametrize(
    "spoilt",
    [
        {"cordoned": True},
        {"ready": False},
        {"quarantined": True},
        {"taints": (Taint("example.com/held"),)},
    ],
)
def test_nodes_that_take_no_pods_are_left_out(spoilt):
    plan = plan_placement([node("n1", "r1", **spoilt), node("n2", "r1")], [fleet(2)])
    assert nodes_of(plan) == [("n2",)]
    assert plan.fleets[0].verdict is Verdict.DOES_NOT_FIT


def test_tolerated_taints_keep_nobody_off():
    rules = NodeRules(tolerations=(Toleration("example.com/held", "Exists"),))
    plan = plan_placement([node("n1", taints=(Taint("example.com/held"),))], [fleet(nodes=rules)])
    assert plan.complete


def test_unlabelled_nodes_hold_what_fits_into_one_of_them():
    cluster = [node("n1"), node("n2"), node("n3", "r1")]
    assert plan_placement(cluster, [fleet(3, engine=Rule("rack"))]).complete
    two = plan_placement(cluster, [fleet(1, pipeline=2, engine=Rule("rack"))]).fleets[0]
    assert two.verdict is Verdict.IMPOSSIBLE


def test_engines_spread_over_the_level_that_is_asked_for():
    cluster = [node(f"n{i}", f"r{i // 4}") for i in range(12)]
    plan = plan_placement(cluster, [fleet(6, spread="rack")])
    racks = [int(place[0][1:]) // 4 for place in nodes_of(plan)]
    assert sorted(racks.count(rack) for rack in range(3)) == [2, 2, 2]


def test_a_fleet_that_must_be_in_one_block_is():
    cluster = [node(f"n{i}", f"r{i // 2}", block=f"b{i // 6}") for i in range(12)] + [node("n12", "r6", block="b2")]
    plan = plan_placement(cluster, [fleet(5, fleet=Rule("block"))])
    assert len({int(place[0][1:]) // 6 for place in nodes_of(plan)}) == 1


@pytest.mark.parametrize("level", ["rack", "nvlink", "host"])
def test_a_fleet_that_prefers_a_domain_too_small_for_one_engine_gets_a_wider_one(level):
    cluster = [node(f"n{i}", block="b") for i in range(4)]
    plan = plan_placement(cluster, [fleet(2, pipeline=2, fleet=Rule("", level))])
    assert nodes_of(plan) == [("n0", "n1"), ("n2", "n3")]


def test_a_preference_gives_way_and_says_so():
    cluster = [node("n1", "r1", block="b"), node("n2", "r2", block="b"), node("n3", "r3", block="c")]
    plan = plan_placement(cluster, [fleet(pipeline=2, engine=Rule("cluster", "rack"))])
    (place,) = plan.fleets[0].engines
    assert place.nodes == ("n1", "n2")
    assert place.degraded == ("engine prefers rack, has block",)
    assert plan.score.degraded == 1


def test_pods_on_shared_nodes_are_paired_so_that_all_fit():
    # Two nodes have room for two pods, two for one: taking both small ones for one engine would strand the other.
    cluster = [node("n1", "r1", 4), node("n2", "r1", 4), node("n3", "r1", 6), node("n4", "r1", 6)]
    plan = plan_placement(cluster, [fleet(2, tensor=2, pipeline=3, engine=Rule("rack"))])
    assert plan.complete
    assert all({"n1", "n2"} < set(place) for place in nodes_of(plan))


def test_three_per_node_of_eight_places_six_engines_and_says_so_before_any_pod():
    plan = plan_placement([node(f"n{i}") for i in range(3)], [fleet(8, tensor=3)])
    (only,) = plan.fleets
    assert (only.verdict, len(only.engines)) == (Verdict.DOES_NOT_FIT, 6)
    assert only.message.startswith(
        "6 of 8 engines placed; engine 6 needs 3 GPUs on one node, largest free is 2 (node n0)"
    )


def test_several_fleets_do_not_take_the_same_gpus():
    cluster = [node(f"n{i}", f"r{i // 2}") for i in range(4)]
    plan = plan_placement(
        cluster, [fleet(4, tensor=4, name="small"), fleet(1, pipeline=2, name="large", engine=Rule("rack"))]
    )
    assert plan.complete
    used = [name for each in plan.fleets for place in each.engines for name in place.nodes for _ in range(place.gpus)]
    assert all(used.count(f"n{i}") == 8 for i in range(4))


class TestStanding:
    cluster = tuple(node(f"n{i}", f"r{i // 2}") for i in range(6))

    def test_what_is_well_stays_although_another_place_is_better(self):
        placed = [Placed("a", 1, ("n2",), 8)]
        plan = plan_placement([*self.cluster[:5], node("n5", "r2", 4)], [fleet(2)], placed)
        assert plan.fleets[0].engines[1].nodes == ("n2",)
        assert plan.fleets[0].engines[1].kept

    def test_a_replacement_fills_the_gap_of_its_number(self):
        placed = [Placed("a", 0, ("n0",), 8), Placed("a", 2, ("n2",), 8)]
        plan = plan_placement(self.cluster, [fleet(3)], placed)
        assert [place.kept for place in plan.fleets[0].engines] == [True, False, True]

    @pytest.mark.parametrize(
        ("placed", "reason"),
        [
            (Placed("a", 0, ("n0", "n9"), 8), "node n9 is gone"),
            (Placed("a", 0, ("n1", "n2"), 8), "its engine group is not in one rack any more"),
            (Placed("a", 0, ("n0", "n1"), 8, well=False), "it is not well"),
            (Placed("a", 0, ("n0",), 8), "it has 1 pods of 8 GPUs"),
            (Placed("a", 0, ("n0", "n0"), 8), "it has 2 pods of 8 GPUs"),
        ],
    )
    def test_what_is_not_well_or_out_of_bounds_moves_and_says_why(self, placed, reason):
        plan = plan_placement(self.cluster, [fleet(1, pipeline=2, engine=Rule("rack"))], [placed])
        (only,) = plan.fleets
        assert only.complete
        assert not only.engines[0].kept
        assert reason in only.moved[0].reason

    def test_an_engine_across_what_must_hold_the_fleet_moves_although_it_is_the_only_one(self):
        placed = [Placed("a", 0, ("n1", "n2"), 8)]
        (only,) = plan_placement(self.cluster, [fleet(1, pipeline=2, fleet=Rule("rack"))], placed).fleets
        assert only.moved[0].reason == "it is not in one rack, as the whole fleet must be"
        assert only.complete

    def test_an_engine_whose_node_is_not_ready_moves(self):
        cluster = [node("n0", "r0", ready=False), node("n1", "r0")]
        (only,) = plan_placement(cluster, [fleet(1)], [Placed("a", 0, ("n0",), 8)]).fleets
        assert (only.engines[0].nodes, only.moved[0].reason) == (("n1",), "node n0 is not Ready")

    def test_an_engine_on_a_cordoned_node_stays_while_it_is_well(self):
        cluster = [node("n0", "r0", cordoned=True), node("n1", "r0")]
        plan = plan_placement(cluster, [fleet(2)], [Placed("a", 0, ("n0",), 8)])
        assert nodes_of(plan) == [("n0",), ("n1",)]

    def test_a_node_that_others_overfilled_loses_its_engine(self):
        plan = plan_placement([node("n0", "", 2), node("n1")], [fleet(1)], [Placed("a", 0, ("n0",), 8)])
        assert nodes_of(plan) == [("n1",)]
        assert plan.fleets[0].moved[0].reason == "node n0 has 6 GPUs for it, and it needs 8"

    def test_engines_beyond_the_wanted_number_give_up_their_nodes(self):
        placed = [Placed("a", 0, ("n0",), 8), Placed("a", 1, ("n1",), 8)]
        plan = plan_placement(self.cluster, [fleet(1)], placed)
        assert nodes_of(plan) == [("n0",)]
        assert plan.score.free_after == 40


class TestMessages:
    def test_one_pod_in_the_way_is_named(self):
        cluster = [node("n0", "r1", 2), node("n1", "r1"), node("n2", "r2", 8), node("n3", "r2", 8)]
        (only,) = plan_placement(cluster, [fleet(1, pipeline=2, engine=Rule("rack"))]).fleets
        assert only.message == (
            "0 of 1 engines placed; engine 0 needs 16 GPUs in one rack, 8 on each of 2 nodes, largest free is 8 (rack r1); "
            "draining pod x/n0 (2 GPUs on node n0) would do"
        )

    def test_several_pods_in_the_way_are_named_where_they_hold_least(self):
        cluster = [node("n0", "r1", 2), node("n1", "r1", 1), node("n2", "r2", 8), node("n3", "r2", 8)]
        (only,) = plan_placement(cluster, [fleet(1, pipeline=2, engine=Rule("rack"))]).fleets
        assert only.message.endswith("draining pods x/n0, x/n1 would do")

    def test_the_rest_of_a_fleet_is_explained_where_the_fleet_is(self):
        cluster = [node("n0", "r1"), node("n1", "r1", 4), *(node(f"m{i}", "r2", 1) for i in range(2))]
        (only,) = plan_placement(cluster, [fleet(2, tensor=8, fleet=Rule("rack"))]).fleets
        assert only.message == (
            "1 of 2 engines placed; engine 1 needs 8 GPUs on one node, largest free is 4 (node n1); "
            "draining pod x/n1 (4 GPUs on node n1) would do"
        )

    def test_a_closed_node_is_named_with_why(self):
        (only,) = plan_placement([node("n0", cordoned=True)], [fleet()]).fleets
        assert only.message.endswith("opening node n0 (cordoned) would do")

    def test_a_missing_label_is_named(self):
        cluster = [node("n0", "r1"), node("n1", "r1", 8), node("n2")]
        (only,) = plan_placement(cluster, [fleet(1, pipeline=2, engine=Rule("rack"))]).fleets
        assert "example.com/rack is not on 1 of the nodes with room, such as n2" in only.message

    def test_nodes_that_refuse_the_pods_are_named(self):
        cluster = [node("n0", taints=(Taint("example.com/held", "yes"),))]
        (only,) = plan_placement(cluster, [fleet()]).fleets
        assert only.verdict is Verdict.IMPOSSIBLE
        assert "taint example.com/held=yes (node n0)" in only.message

    def test_notes_name_levels_and_nodes(self):
        plan = plan_placement([node("n0", "r1"), node("n1", cordoned=True)], [fleet()])
        assert plan.notes == (
            "no node carries example.com/block, so the level block is not there",
            "no node carries example.com/clique, so the level nvlink is not there",
            "without example.com/rack, 1 of 2 nodes count as a rack of their own each: n1",
            "node n1 takes no new pods: cordoned",
        )


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (
            [fleet(tensor=1, engine=Rule("shelf"))],
            "placement.engine.required names the level 'shelf', which is none of cluster, block",
        ),
        ([fleet(engine=Rule("rack", "block"))], "preferred block is wider than placement.engine.required rack"),
        (
            [fleet(spread="shelf")],
            "placement.spread names the level 'shelf', which is none of block, rack, nvlink, host",
        ),
        ([fleet(), fleet()], "fleet a is given twice"),
        ([fleet(), PlacementRequest("b", 1)], "placement.levels of the fleets a and b differ"),
    ],
)
def test_requests_that_contradict_are_refused_by_field(requests, message):
    cluster = [node("n0", "r", block="b"), node("n1", "r2", block="b")]
    with pytest.raises(InvalidSpecError, match=message):
        plan_placement(cluster, requests)


def test_an_empty_cluster_and_an_empty_fleet_are_plans_too():
    assert plan_placement([], [fleet(0)]).complete
    assert plan_placement([], [fleet(1)]).fleets[0].verdict is Verdict.IMPOSSIBLE
    assert plan_placement([node("n")], []).complete
