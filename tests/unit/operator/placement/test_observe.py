"""Kubernetes objects -> what the planner takes; wrong ones are refused by object, field, value and rule."""

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.placement.objects import RACK, engine_body, fleet_body, node_body, pod_body
from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement.asked import observe_request
from rolloutfleet_operator.plan.placement.nodes import OtherPod, Rule, Taint, Toleration
from rolloutfleet_operator.plan.placement.observe import observe_nodes, observe_placed
from rolloutfleet_operator.plan.placement.request import Placed
from rolloutfleet_operator.plan.placement.request import Rule as Wanted
from rolloutfleet_operator.plan.placement.shape import Parallelism
from rolloutfleet_operator.plan.placement.tree import DEFAULT_LEVELS, Level


def test_a_fleet_says_sizes_levels_rules_and_what_was_read():
    request = observe_request(
        fleet_body(
            replicas=3,
            parallelism={"tensor": 4, "expert": 16, "gpusPerNode": 8},
            placement={
                "levels": [{"name": "rack", "nodeLabel": "example.com/rack"}],
                "expert": {"required": "rack"},
                "engine": {"preferred": "rack"},
                "spread": "rack",
                "gpuResource": "example.com/gpu",
            },
            template={
                "nodeSelector": {"pool": "rl"},
                "tolerations": [{"key": "held", "operator": "Exists"}],
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {
                                    "matchExpressions": [{"key": "gen", "operator": "In", "values": ["a", "b"]}],
                                    "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}],
                                }
                            ]
                        }
                    }
                },
            },
        )
    )
    assert (request.fleet, request.replicas, request.parallelism) == ("rl/large", 3, Parallelism(4, 1, 16))
    assert (request.gpus_per_node, request.spread, request.gpu_resource) == (8, "rack", "example.com/gpu")
    assert request.levels == (Level("rack", "example.com/rack"),)
    assert request.rules == {"expert": Wanted("rack"), "engine": Wanted("", "rack")}
    assert request.nodes.selector == {"pool": "rl"}
    assert request.nodes.tolerations == (Toleration("held", "Exists"),)
    assert request.nodes.terms == (
        (Rule("gen", "In", ("a", "b")), Rule("metadata.name", "NotIn", ("n9",), on_name=True)),
    )
    assert request.fields == (
        "parallelism.expert",
        "parallelism.gpusPerNode",
        "parallelism.tensor",
        "placement.engine",
        "placement.expert",
        "placement.gpuResource",
        "placement.levels",
        "placement.spread",
        "replicas",
        "template.affinity.nodeAffinity",
        "template.nodeSelector",
        "template.tolerations",
    )


def test_a_fleet_of_defaults_is_one_engine_of_one_gpu():
    request = observe_request({"metadata": {"name": "a"}, "spec": {"placement": None}})
    assert (request.fleet, request.replicas, request.parallelism) == ("default/a", 1, Parallelism())
    assert (request.levels, request.fields) == (DEFAULT_LEVELS, ())


def test_a_suspended_fleet_wants_no_engine():
    assert observe_request(fleet_body(suspend=True)).replicas == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replicas": "3"}, "spec.replicas is '3', but it must be a whole number of at least 0"),
        ({"replicas": True}, "spec.replicas is True, but"),
        ({"suspend": "no"}, "spec.suspend is 'no', but it must be true or false"),
        ({"parallelism": 8}, "spec.parallelism is 8, but it must be a mapping"),
        ({"parallelism": {"tensor": 0}}, "spec.parallelism.tensor is 0, but it must be a whole number of at least 1"),
        (
            {"parallelism": {"data": 2}},
            "spec.parallelism.data is unknown; there are expert, gpusPerNode, pipeline, tensor",
        ),
        ({"placement": {"rack": "a"}}, "spec.placement.rack is unknown; there are engine, expert, fleet, gpuResource"),
        ({"placement": {"engine": "rack"}}, "spec.placement.engine is 'rack', but it must be a mapping"),
        (
            {"placement": {"engine": {"must": "rack"}}},
            "spec.placement.engine.must is unknown; there are preferred, required",
        ),
        ({"placement": {"levels": [{"name": "rack"}]}}, "spec.placement.levels[0] must have a name and a nodeLabel"),
        ({"placement": {"gpuResource": ""}}, "spec.placement.gpuResource is empty, so the engines run on CPUs"),
        (
            {"template": {"nodeSelector": {"pool": 1}}},
            "spec.template.nodeSelector.pool is 1, but it must be a string (put",
        ),
        (
            {"template": {"tolerations": [{"operator": "Has"}]}},
            "operator is 'Has', but it must be one of Equal, Exists",
        ),
    ],
)
def test_a_wrong_field_is_named_with_value_and_rule(spec, message):
    with pytest.raises(InvalidSpecError, match=re.escape(message)) as caught:
        observe_request(fleet_body(**spec))
    assert caught.value.message.startswith("fleet rl/large: ")


def test_expert_that_is_no_multiple_of_tensor_is_refused_with_both_numbers():
    with pytest.raises(
        InvalidSpecError, match=r"expert is 12, which is no multiple of parallelism.tensor 8.*set expert to 8 or 16"
    ):
        observe_request(fleet_body(parallelism={"tensor": 8, "expert": 12}))


def test_all_faults_of_a_fleet_are_told_at_once():
    with pytest.raises(InvalidSpecError) as caught:
        observe_request(fleet_body(replicas=-1, parallelism={"tensor": 2.5}, placement={"spread": 3}))
    assert caught.value.message.count(", but it must be ") == 3


def test_nodes_carry_labels_taints_and_what_others_hold():
    request = observe_request(fleet_body())
    taints = [
        {"key": "held", "value": "yes", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
    ]
    pods = [
        pod_body("b", "n1", "2"),
        pod_body("a", "n1", 1),
        pod_body("done", "n1", "4", phase="Succeeded"),
        pod_body("waiting", "", "4"),
        pod_body("elsewhere", "n2", "8"),
        pod_body("cpu", "n1", "0"),
        engine_body("large", 0, 0, "n1", 4),
        engine_body("another", 0, 0, "n1", 1),
    ]
    nodes = [node_body("n1", "r1", taints=taints, unschedulable=True), node_body("n2", "r1", ready="Unknown")]
    first, second = observe_nodes(nodes, pods, [request])
    assert (first.name, first.gpus, first.labels[RACK]) == ("n1", 8, "r1")
    assert first.others == (OtherPod("data/a", 1), OtherPod("data/b", 2), OtherPod("rl/another-0-0-1", 1))
    assert first.taints == (Taint("held", "yes"),)
    assert (first.cordoned, first.ready, second.ready) == (True, True, False)


def test_init_containers_count_when_they_hold_more_and_sidecars_add():
    pod = pod_body("a", "n1", "2")
    side = {"restartPolicy": "Always", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    pod["spec"]["initContainers"] = [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}, side]
    request = observe_request(fleet_body())
    assert observe_nodes([node_body("n1")], [pod], [request])[0].used_by_others == 3
    pod["spec"]["initContainers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "6"
    assert observe_nodes([node_body("n1")], [pod], [request])[0].used_by_others == 6


def test_placed_engines_are_those_of_the_newest_pods_in_order_of_ranks():
    request = observe_request(fleet_body())
    leaving = engine_body("large", 2, 0, "n5", 8)
    leaving["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"
    pods = [
        engine_body("large", 1, 1, "n2", 8),
        engine_body("large", 1, 0, "n1", 8),
        engine_body("large", 0, 0, "n9", 8),
        engine_body("large", 0, 0, "n3", 8, incarnation=2),
        engine_body("large", 0, 1, "n4", 4),
        leaving,
        pod_body("x", "n1", 1),
    ]
    assert observe_placed(pods, [request]) == [
        Placed("rl/large", 0, ("n3", "n4"), 8, well=False),
        Placed("rl/large", 1, ("n1", "n2"), 8),
    ]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            node_body("n1", gpus="eight"),
            "node n1: status.allocatable[nvidia.com/gpu] is 'eight', but it must be a whole number",
        ),
        (node_body("n1", taints="held"), "node n1: spec.taints is 'held', but it must be a list"),
        (node_body("n1") | {"status": []}, "node n1: status is [], but it must be a mapping"),
    ],
)
def test_a_wrong_node_is_refused_by_name_and_field(node, message):
    with pytest.raises(InvalidSpecError, match=re.escape(message)):
        observe_nodes([node], [], [observe_request(fleet_body())])


def test_a_wrong_pod_is_refused_by_name_and_field():
    request = observe_request(fleet_body())
    with pytest.raises(
        InvalidSpecError, match=r"pod data/a: spec.containers\[0\].resources.limits\[nvidia.com/gpu\] is 1.5"
    ):
        observe_nodes([node_body("n1")], [pod_body("a", "n1", 1.5)], [request])
    pod = engine_body("large", 0, 0, "n1", 8)
    pod["metadata"]["labels"]["rolloutfleet.io/engine"] = "first"
    with pytest.raises(
        InvalidSpecError, match=r"pod rl/large-0-0-1: metadata.labels\[rolloutfleet.io/engine\] is 'first'"
    ):
        observe_placed([pod], [request])


def test_fleets_of_two_resources_are_not_planned_together():
    requests = [
        observe_request(fleet_body("a")),
        observe_request(fleet_body("b", placement={"gpuResource": "example.com/gpu"})),
    ]
    with pytest.raises(
        InvalidSpecError, match=r"count example.com/gpu and nvidia.com/gpu; plan those of one resource together"
    ):
        observe_nodes([], [], requests)


_JUNK = st.none() | st.booleans() | st.integers(-3, 99) | st.floats(allow_nan=False) | st.text(max_size=3)
_VALUES = st.recursive(
    _JUNK,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def _places(value: object, path: tuple = ()) -> list[tuple]:
    """The path of every value inside a value."""
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += _places(child, (*path, key))
    return found


def _spoil(body: dict, path: tuple, value: object) -> dict:
    spoilt = copy.deepcopy(body)
    at = spoilt
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return spoilt


_FULL = {
    "fleet": fleet_body(
        suspend=False,
        placement={"levels": [{"name": "rack", "nodeLabel": "r"}], "engine": {"required": "rack"}, "spread": "rack"},
        template={"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k", "operator": "Exists"}]},
    ),
    "node": node_body("n1", "r1", taints=[{"key": "k", "effect": "NoSchedule"}], unschedulable=False),
    "pod": engine_body("large", 0, 0, "n1", 8),
}


@given(st.sampled_from(sorted(_FULL)), st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_stands_in_a_field_is_read_or_refused_in_words(kind, data):
    body = _FULL[kind]
    # A name that is no string never reaches the planner: whoever reads the file refuses it.
    paths = [path for path in _places(body) if path not in {("metadata",), ("metadata", "name")}]
    bodies = {**_FULL, kind: _spoil(body, data.draw(st.sampled_from(paths)), data.draw(_VALUES))}
    message = ""
    try:
        request = observe_request(bodies["fleet"])
        observe_nodes([bodies["node"]], [bodies["pod"]], [request])
        observe_placed([bodies["pod"]], [request])
    except InvalidSpecError as refused:
        message = refused.message
    assert not message or re.match(r"(fleet|node|pod) \S+: ", message)
