"""Nodes that are lost, avoided, or about to go."""

import pytest

from rolloutfleet_operator.api.podparts import Toleration
from rolloutfleet_operator.plan.leaving import LEAVING_TAINTS, mark_leaving
from rolloutfleet_operator.plan.observe import observe_node, observe_pod
from rolloutfleet_operator.plan.observed import Node
from rolloutfleet_operator.render.engine import render_engine_pod, render_engine_template
from rolloutfleet_operator.render.nodes import avoid_nodes, node_loss_tolerations

NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"key": "gpu", "operator": "Exists"}, [NOT_READY, UNREACHABLE]),
        ({"key": NOT_READY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600}, [UNREACHABLE]),
        ({"key": NOT_READY, "operator": "Exists", "effect": "NoSchedule"}, [NOT_READY, UNREACHABLE]),
        ({"operator": "Exists"}, []),
    ],
)
def test_how_long_a_pod_stays_on_a_lost_node_is_the_users_to_say(given, ours):
    made = node_loss_tolerations([Toleration.model_validate(given)], 7)
    assert [toleration["key"] for toleration in made] == ours
    assert {toleration["tolerationSeconds"] for toleration in made} <= {7}


def test_no_affinity_keeps_off_the_nodes_one_rule_each():
    rules = avoid_nodes(None, ["b", "a"])["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert rules == [
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("a", "b")]}
    ]


def test_every_term_of_the_users_affinity_keeps_off_the_node_and_the_rest_stays():
    zone, size = ({"key": key, "operator": "Exists"} for key in ("zone", "size"))
    given = {
        "nodeAffinity": {
            REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchExpressions": [size]}, {}]},
            "preferredDuringSchedulingIgnoredDuringExecution": ["kept"],
        },
        "podAntiAffinity": {"also": "kept"},
    }
    made = avoid_nodes(given, ["a"])
    rule = [{"key": "metadata.name", "operator": "NotIn", "values": ["a"]}]
    assert made["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {"matchExpressions": [zone], "matchFields": rule},
        {"matchExpressions": [size], "matchFields": rule},
        {},
    ]
    assert made["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == ["kept"]
    assert made["podAntiAffinity"] == {"also": "kept"}
    assert "matchFields" not in given["nodeAffinity"][REQUIRED]["nodeSelectorTerms"][0]


def test_avoiding_a_node_is_no_new_revision(identity, make_spec, images):
    template = render_engine_template(identity, make_spec(), images)
    plain, kept_off = (render_engine_pod(identity, template, 0, 0, nodes) for nodes in ((), ("a",)))
    assert plain["metadata"] == kept_off["metadata"]
    assert "affinity" not in plain["spec"]
    assert kept_off["spec"]["affinity"] == avoid_nodes(None, ["a"])


@pytest.mark.parametrize("taint", [*sorted(LEAVING_TAINTS), "own/notice"])
def test_a_taint_that_announces_a_nodes_end_marks_its_pods(make_pod, taint):
    here, there = make_pod(0), make_pod(1, node="node-2")
    marked = mark_leaving([here, there], [Node("node-1", (), (taint,)), Node("node-2", ())], ["own/notice"])
    assert [pod.leaving for pod in marked] == [f"node node-1 has the taint {taint}", ""]


def test_a_cordon_alone_announces_nothing(make_pod):
    body = {
        "metadata": {"name": "node-1"},
        "spec": {
            "unschedulable": True,
            "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
        },
    }
    assert [pod.leaving for pod in mark_leaving([make_pod(0)], [observe_node(body)])] == [""]


def test_an_annotation_announces_a_pods_end_where_nodes_may_not_be_read():
    metadata = {
        "name": "demo-0-0-0",
        "uid": "u",
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "annotations": {"rolloutfleet.io/leaving": "spot notice"},
    }
    (pod,) = mark_leaving([observe_pod({"metadata": metadata})], None)
    assert pod.leaving == "spot notice"


def test_a_pod_that_was_evicted_is_told_from_one_that_failed():
    metadata = {"name": "demo-0-0-0", "uid": "u", "creationTimestamp": "2026-01-02T03:04:05Z"}
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    assert observe_pod({"metadata": metadata, "status": {"phase": "Failed", "conditions": conditions}}).disrupted
