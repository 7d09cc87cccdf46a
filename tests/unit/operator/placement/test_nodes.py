"""Whether pods may go to a node: selector, taints and affinity as Kubernetes reads them."""

import pytest

from rolloutfleet_operator.plan.placement.nodes import NodeFacts, NodeRules, OtherPod, Rule, Taint, Toleration

NODE = NodeFacts(
    "n1", 8, {"pool": "rl", "generation": "9"}, taints=(Taint("held", "yes"), Taint("soft", "", "PreferNoSchedule"))
)
TOLERANT = (Toleration("held", "Exists"),)


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration("held", "Exists"), True),
        (Toleration("held", "Equal", "yes"), True),
        (Toleration("held", "Equal", "no"), False),
        (Toleration("other", "Exists"), False),
        (Toleration("", "Exists"), True),
        (Toleration("", "Equal"), False),
        (Toleration("held", "Exists", effect="NoSchedule"), True),
        (Toleration("held", "Exists", effect="NoExecute"), False),
    ],
)
def test_tolerations(toleration, tolerated):
    assert NodeRules(tolerations=(toleration,)).admits(NODE) == tolerated
    assert NodeRules(tolerations=(toleration,)).refusal(NODE) == ("" if tolerated else "taint held=yes")


@pytest.mark.parametrize(
    ("selector", "refusal"),
    [({"pool": "rl"}, ""), ({"pool": "web"}, "nodeSelector pool=web"), ({"x": ""}, "nodeSelector x=")],
)
def test_selectors(selector, refusal):
    assert NodeRules(selector, TOLERANT).refusal(NODE) == refusal


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        (Rule("pool", "In", ("rl", "web")), True),
        (Rule("pool", "In", ("web",)), False),
        (Rule("x", "In", ("web",)), False),
        (Rule("pool", "NotIn", ("rl",)), False),
        (Rule("x", "NotIn", ("rl",)), True),
        (Rule("pool", "Exists"), True),
        (Rule("x", "Exists"), False),
        (Rule("x", "DoesNotExist"), True),
        (Rule("pool", "DoesNotExist"), False),
        (Rule("generation", "Gt", ("8",)), True),
        (Rule("generation", "Gt", ("9",)), False),
        (Rule("generation", "Lt", ("10",)), True),
        (Rule("generation", "Lt", ("ten",)), False),
        (Rule("generation", "Lt", ("10", "11")), False),
        (Rule("pool", "Gt", ("1",)), False),
        (Rule("x", "Gt", ("1",)), False),
        (Rule("metadata.name", "In", ("n1",), on_name=True), True),
        (Rule("metadata.name", "NotIn", ("n1",), on_name=True), False),
        (Rule("pool", "Like", ("r*",)), False),
    ],
)
def test_rules_of_affinity(rule, holds):
    assert rule.holds(NODE) == holds


def test_one_term_must_hold_wholly_and_an_empty_one_holds_nowhere():
    holds, fails = Rule("pool", "Exists"), Rule("x", "Exists")
    for terms, admits in (
        (((holds,), (fails,)), True),
        (((holds, fails),), False),
        (((),), False),
        ((), False),
        (None, True),
    ):
        assert NodeRules(tolerations=TOLERANT, terms=terms).admits(NODE) == admits


def test_free_gpus_and_why_a_node_is_closed():
    assert NodeFacts("n", 8, others=(OtherPod("a", 3), OtherPod("b", 7))).free == 0
    assert NodeFacts("n", 8, others=(OtherPod("a", 3),)).free == 5
    closed = NodeFacts("n", 8, ready=False, cordoned=True, quarantined=True)
    assert (closed.free, closed.closed_because) == (0, "not Ready and cordoned and quarantined")
