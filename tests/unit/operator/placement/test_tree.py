"""Labels -> domains: what is unlabelled stands alone and harms nobody."""

import pytest

from rolloutfleet_operator.plan.placement.nodes import NodeFacts, natural
from rolloutfleet_operator.plan.placement.tree import DEFAULT_LEVELS, HOST, Level, build_tree

BLOCK, RACK = Level("block", "example.com/block"), Level("rack", "example.com/rack")
LEVELS = (BLOCK, RACK, HOST)


def node(name: str, block: str = "", rack: str = "") -> NodeFacts:
    labels = {BLOCK.label: block, RACK.label: rack}
    return NodeFacts(name, 8, {key: value for key, value in labels.items() if value})


def outline(tree) -> list[str]:
    return [f"{'  ' * tree.depth[domain]}{tree.title(domain)}" for domain in range(len(tree.parent))]


def test_nodes_of_one_value_share_a_domain_and_numbers_sort_as_numbers():
    tree = build_tree([node("n10", "b", "r2"), node("n9", "b", "r2"), node("n1", "b", "r10")], LEVELS)
    assert outline(tree) == [
        "the cluster",
        "  block b",
        "    rack r2",
        "      node n9",
        "      node n10",
        "    rack r10",
        "      node n1",
    ]


def test_equal_rack_names_in_two_blocks_are_two_racks():
    tree = build_tree([node("n1", "b1", "r1"), node("n2", "b2", "r1")], LEVELS)
    assert len(tree.at_depth(2)) == 2


def test_unlabelled_nodes_count_as_racks_of_their_own_and_are_named():
    tree = build_tree([node("n1", "b", "r1"), node("n2", "b"), node("n3", "b"), node("n4")], LEVELS)
    assert tree.unlabelled == {"block": ("n4",), "rack": ("n2", "n3", "n4")}
    assert [tree.title(domain) for domain in tree.at_depth(2)] == [
        "rack r1",
        "unlabelled rack of n2",
        "unlabelled rack of n3",
        "unlabelled rack of n4",
    ]


def test_an_unlabelled_wide_level_leaves_known_finer_domains_together():
    tree = build_tree([node("n1", "b", "r1"), node("n2", "", "r7"), node("n3", "", "r7")], LEVELS)
    shared = tree.meeting([tree.leaf["n2"], tree.leaf["n3"]])
    assert tree.title(shared) == "rack r7"
    assert not tree.known[tree.parent[shared]]


def test_a_level_that_no_node_carries_is_left_out_and_stands_for_the_next_finer_one():
    tree = build_tree([node("n1", rack="r1"), node("n2", rack="r1")], DEFAULT_LEVELS[:1] + LEVELS)
    assert [level.name for level in tree.unused] == ["zone", "block"]
    assert tree.depths == {"cluster": 0, "zone": 1, "block": 1, "rack": 1, "host": 2}


def test_the_tree_of_no_nodes_is_the_empty_cluster():
    tree = build_tree([], LEVELS)
    assert outline(tree) == ["the cluster"]
    assert tree.leaves() == []


def test_numbers_of_a_domain_enclose_those_of_everything_inside():
    tree = build_tree([node(f"n{i}", f"b{i % 2}", f"r{i % 3}") for i in range(12)], LEVELS)
    for domain in range(len(tree.parent)):
        inside = tree.inside(domain)
        for other in range(len(tree.parent)):
            lies_in = tree.depth[other] >= tree.depth[domain] and tree.ancestor(other, tree.depth[domain]) == domain
            assert (other in inside) == lies_in


@pytest.mark.parametrize(
    ("nodes", "levels", "message"),
    [
        ([node("n1"), node("n1")], LEVELS, "node n1 is listed twice"),
        ([node("n1")], (RACK, Level("rack", "other")), "the name 'rack' is given twice"),
        ([node("n1")], (RACK, Level("other", RACK.label)), "the label 'example.com/rack' is given twice"),
    ],
)
def test_what_is_given_twice_is_refused(nodes, levels, message):
    with pytest.raises(ValueError, match=message):
        build_tree(nodes, levels)


def test_natural_order():
    assert sorted(["n10", "n9", "a", "n", "10", "9"], key=natural) == ["9", "10", "a", "n", "n9", "n10"]
