"""Which failures count, when an engine is retired, and when a node is avoided."""

from datetime import timedelta

import pytest

from rolloutfleet_operator.api.recovery import RecoverySpec, RecoveryStatus
from rolloutfleet_operator.plan.recovery import RecoveryGoal, due_in, plan_recovery

NOTHING = RecoveryStatus()


@pytest.fixture
def judge(now):
    def run(previous, *pods, at=0.0, engines=3, revision="new", revive="", **spec) -> RecoveryStatus:
        goal = RecoveryGoal(RecoverySpec.model_validate(spec), engines, revision, revive)
        return plan_recovery(goal, previous, list(pods), now + timedelta(seconds=at))

    return run


@pytest.fixture
def failing(make_pod, now):
    """A pod of an engine that has failed so often, the last time at the given moment."""

    def make(restarts, engine=0, *, at=0.0, born=-600.0, words="CUDA error", **fields):
        container = {
            "restarts": restarts,
            "exit_code": 1,
            "exit_message": words,
            "ended_at": now + timedelta(seconds=at),
        }
        return make_pod(engine, container=container, created=now + timedelta(seconds=born), **fields)

    return make


def test_an_engine_within_its_budget_is_remembered_and_not_retired(judge, failing):
    status = judge(NOTHING, failing(5))
    assert (status.retired, len(status.engines[0].failures)) == ((), 5)
    assert status.engines[0].message == "pod demo-0-0-0: CUDA error"


def test_one_failure_beyond_the_budget_retires_an_engine_for_good(judge, failing):
    status = judge(judge(NOTHING, failing(5)), failing(6))
    assert status.retired == (0,)
    gone = judge(status, at=7200)
    assert gone.retired == (0,)
    assert "CUDA error" in gone.engines[0].message


def test_a_failure_is_counted_once_however_often_it_is_looked_at(judge, failing):
    status = judge(NOTHING, failing(3))
    assert judge(status, failing(3), at=30) == status
    assert len(judge(status, failing(4, at=40), at=40).engines[0].failures) == 4


def test_an_operator_that_begins_anew_counts_on_from_what_the_status_holds(judge, failing):
    stored = RecoveryStatus.model_validate(judge(NOTHING, failing(5)).body())
    assert judge(stored, failing(6)).retired == (0,)


def test_failures_outside_the_window_are_forgotten(judge, failing):
    status = judge(NOTHING, failing(5))
    assert judge(status, failing(5), at=3601) == NOTHING
    assert not judge(status, failing(6, at=3601), at=3601).retired


def test_of_restarts_from_before_the_window_only_the_last_one_counts(judge, failing):
    status = judge(NOTHING, failing(40, born=-90000))
    assert (status.retired, len(status.engines[0].failures)) == ((), 1)
    assert judge(NOTHING, failing(40, at=-4000, born=-90000)) == NOTHING


def test_an_engine_that_serves_is_not_retired(judge, failing):
    status = judge(NOTHING, failing(9, ready=True, born=-500))
    assert not status.retired


def test_an_engine_over_its_budget_that_is_merely_not_ready_has_not_failed_again(judge, failing):
    status = judge(NOTHING, failing(9, ready=True, born=-500))
    assert not judge(status, failing(9), at=10).retired
    assert judge(status, failing(10, at=10), at=10).retired == (0,)


def test_failures_of_a_pod_and_of_its_replacement_add_up(judge, failing, make_pod, now):
    status = judge(NOTHING, failing(4))
    second = make_pod(
        0, 1, created=now, container={"restarts": 2, "exit_code": 1, "ended_at": now + timedelta(seconds=9)}
    )
    assert judge(status, second, at=10).retired == (0,)


def test_a_pod_that_ends_for_good_is_one_failure_unless_it_was_taken_away(judge, make_pod, now):
    ended = {"phase": "Failed", "created": now}
    assert len(judge(NOTHING, make_pod(0, **ended)).engines[0].failures) == 1
    assert judge(NOTHING, make_pod(0, **ended, disrupted=True)) == NOTHING


def test_pulling_an_image_and_waiting_for_a_node_are_no_failures(judge, make_pod):
    pulling = make_pod(0, phase="Pending", container={"waiting_reason": "ImagePullBackOff"})
    waiting = make_pod(1, phase="Pending", node="", unschedulable="0/4 nodes")
    assert judge(NOTHING, pulling, waiting) == NOTHING


@pytest.mark.parametrize("change", [{"revision": "newer"}, {"restartBudget": 6}, {"revive": "2026-01-02"}])
def test_a_new_spec_a_larger_budget_or_a_wish_gives_another_chance(judge, failing, change):
    retired = judge(NOTHING, failing(6))
    assert retired.retired == (0,)
    assert not judge(retired, at=60, **change).retired


def test_a_revived_engine_does_not_answer_for_its_old_pod_that_is_still_going(judge, failing):
    retired = judge(NOTHING, failing(6))
    assert judge(retired, failing(6, terminating=True), at=5, revive="monday").engines == ()


def test_a_wish_is_obeyed_once(judge, failing):
    revived = judge(judge(NOTHING, failing(6)), revive="monday")
    again = judge(revived, failing(6, at=60, uid="other"), at=60, revive="monday")
    assert (revived.revived, again.retired) == ("monday", (0,))


def test_a_wish_that_names_engines_revives_these_and_leaves_the_others_retired(judge, failing):
    retired = judge(NOTHING, failing(6), failing(6, 1), failing(6, 2))
    assert retired.retired == (0, 1, 2)
    one = judge(retired, at=5, revive="1@monday")
    assert (one.retired, one.revived) == ((0, 2), "1@monday")
    assert judge(one, at=10, revive="1@monday").retired == (0, 2)
    assert judge(one, at=10, revive="monday").retired == ()


def test_only_a_wish_for_all_engines_has_avoided_nodes_used_again(judge, failing, make_pod):
    avoided = judge(NOTHING, failing(3), make_pod(1, ready=True, node="node-2"))
    assert judge(avoided, at=5, revive="0@monday").quarantined_nodes == avoided.quarantined_nodes
    assert judge(avoided, at=5, revive="monday").quarantined_nodes == ()


def test_a_node_is_avoided_when_engines_fail_there_and_serve_elsewhere(judge, failing, make_pod):
    serving = make_pod(1, ready=True, node="node-2")
    status = judge(NOTHING, failing(3), serving)
    assert [(node.node, node.failures) for node in status.quarantined_nodes] == [("node-1", 3)]


def test_a_fault_that_fails_everywhere_blames_no_node(judge, failing):
    status = judge(NOTHING, failing(3), failing(3, 1, node="node-2"))
    assert not status.quarantined_nodes


def test_the_last_node_that_serves_is_not_avoided(judge, failing, make_pod):
    assert not judge(NOTHING, failing(3), make_pod(1, ready=True)).quarantined_nodes


def test_a_quarantine_ends_and_old_failures_do_not_begin_it_anew(judge, failing, make_pod, now):
    serving = make_pod(1, ready=True, node="node-2")
    status = judge(NOTHING, failing(3), serving)
    assert due_in(status, now) == 1800
    over = judge(status, failing(3), serving, at=1801)
    assert (over.quarantined_nodes, len(over.engines[0].failures)) == ((), 3)


def test_no_node_is_avoided_when_the_threshold_is_nought(judge, failing, make_pod):
    serving = make_pod(1, ready=True, node="node-2")
    assert not judge(NOTHING, failing(5), serving, quarantineNodes={"afterFailures": 0}).quarantined_nodes


def test_what_is_remembered_is_bounded(judge, failing):
    pods = [failing(1 + engine % 3, engine, node=f"node-{engine}") for engine in range(400)]
    status = judge(NOTHING, *pods, engines=400)
    assert len(status.engines) == 256
    assert {len(record.failures) for record in status.engines} == {2, 3}
