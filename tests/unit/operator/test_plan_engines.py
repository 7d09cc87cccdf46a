"""Which engine pods are made and ended, case by case."""

from datetime import timedelta

import pytest

from rolloutfleet_operator.plan.engines import EngineGoal, EnginePlan, current_pods, plan_engines
from rolloutfleet_operator.plan.roster import plan_roster


@pytest.fixture
def plan(now):
    def run(engines, own=(), foreign=(), *, may_disrupt=True, retired=(), avoided=()) -> EnginePlan:
        goal = EngineGoal(engines, "new", may_disrupt, frozenset(retired), frozenset(avoided))
        return plan_engines(goal, list(own), list(foreign), now)

    return run


def names(pods):
    return [pod.name for pod in pods]


def test_missing_engines_are_made_all_at_once(plan):
    assert plan(3).create == ((0, 0), (1, 0), (2, 0))


def test_engines_beyond_the_number_go(plan, make_pod):
    result = plan(1, [make_pod(0, ready=True), make_pod(1, ready=True), make_pod(2)])
    assert (result.create, names(result.delete)) == ((), ["demo-1-0-0", "demo-2-0-0"])


def test_nothing_is_to_do_when_all_is_well(plan, make_pod):
    assert not plan(2, [make_pod(0, ready=True), make_pod(1)])


def test_a_replacement_does_not_wait_for_a_pod_that_is_stuck_in_its_end(plan, make_pod):
    result = plan(1, [make_pod(0, 3, terminating=True, ready=True)])
    assert (result.create, result.delete) == (((0, 4),), ())


def test_names_of_a_former_fleet_are_not_used_again(plan, make_pod):
    assert plan(1, foreign=[make_pod(0, 2, owner_uid="former")]).create == ((0, 3),)


def test_a_dead_pod_is_replaced_and_then_removed(plan, make_pod):
    result = plan(1, [make_pod(0, 0, phase="Failed")])
    assert (result.create, names(result.delete)) == (((0, 1),), ["demo-0-0-0"])


@pytest.mark.parametrize(("incarnation", "age", "wait"), [(0, 0.5, 0.5), (3, 1, 7), (20, 10, 290)])
def test_pods_that_die_young_are_replaced_later_and_later(plan, make_pod, now, incarnation, age, wait):
    dead = make_pod(0, incarnation, phase="Failed", created=now - timedelta(seconds=age))
    result = plan(1, [dead])
    assert (result.create, result.delete, result.retry_after) == ((), (), pytest.approx(wait))


def test_a_new_revision_is_tried_without_delay(plan, make_pod, now):
    dead = make_pod(0, 9, phase="Failed", created=now, revision="old")
    assert plan(1, [dead]).create == ((0, 10),)


class TestUpdates:
    def test_one_engine_that_serves_is_replaced_at_a_time_lowest_first(self, plan, make_pod):
        result = plan(3, [make_pod(e, ready=True, revision="old") for e in range(3)])
        assert (result.create, names(result.delete)) == (((0, 1),), ["demo-0-0-0"])

    def test_nothing_that_serves_goes_while_a_new_pod_does_not_serve(self, plan, make_pod):
        pods = [make_pod(0, 1), make_pod(1, ready=True, revision="old")]
        assert not plan(2, pods)

    def test_nothing_that_serves_goes_while_an_engine_is_missing(self, plan, make_pod):
        result = plan(3, [make_pod(0, ready=True, revision="old"), make_pod(1, ready=True, revision="old")])
        assert (result.create, result.delete) == (((2, 0),), ())

    def test_broken_pods_of_an_old_revision_go_first_and_all_at_once(self, plan, make_pod):
        pods = [make_pod(0, ready=True, revision="old"), make_pod(1, revision="old"), make_pod(2, revision="old")]
        result = plan(3, pods)
        assert (result.create, names(result.delete)) == (((1, 1), (2, 1)), ["demo-1-0-0", "demo-2-0-0"])

    def test_the_next_follows_once_the_first_serves(self, plan, make_pod):
        pods = [make_pod(0, 1, ready=True), make_pod(1, ready=True, revision="old")]
        assert names(plan(2, pods).delete) == ["demo-1-0-0"]

    def test_nothing_that_serves_goes_when_the_new_shape_fits_no_node(self, plan, make_pod):
        pods = [make_pod(0, ready=True, revision="old"), make_pod(1, revision="old")]
        assert names(plan(2, pods, may_disrupt=False).delete) == ["demo-1-0-0"]

    def test_a_successor_that_is_there_already_is_kept_and_no_third_is_made(self, plan, make_pod):
        pods = [make_pod(0, 0, ready=True, revision="old"), make_pod(0, 1), make_pod(1, ready=True)]
        result = plan(2, pods)
        assert (result.create, names(result.delete)) == ((), ["demo-0-0-0"])


def test_of_two_pods_of_an_engine_the_one_that_serves_counts(make_pod):
    serving, starting = make_pod(0, 0, ready=True), make_pod(0, 1)
    assert current_pods([starting, serving])[0] is serving


def test_of_two_pods_that_do_not_serve_the_newest_of_the_revision_counts(make_pod):
    pods = [make_pod(0, 5, revision="old"), make_pod(0, 1), make_pod(0, 2)]
    assert current_pods(pods, "new")[0].incarnation == 2


class TestRetirement:
    def test_a_retired_engine_loses_its_pod_and_gets_no_other(self, plan, make_pod):
        result = plan(3, [make_pod(0, ready=True), make_pod(1), make_pod(2, ready=True)], retired=[1])
        assert (result.create, names(result.delete)) == ((), ["demo-1-0-0"])

    def test_a_dead_pod_of_a_retired_engine_goes_without_a_replacement(self, plan, make_pod):
        result = plan(2, [make_pod(0, ready=True), make_pod(1, phase="Failed")], retired=[1])
        assert (result.create, names(result.delete)) == ((), ["demo-1-0-0"])

    def test_an_update_goes_on_without_a_retired_engine(self, plan, make_pod):
        pods = [make_pod(engine, ready=True, revision="old") for engine in (0, 2)]
        assert names(plan(3, pods, retired=[1]).delete) == ["demo-0-0-0"]


class TestNodesThatAreAvoided:
    def test_a_pod_that_fails_there_is_replaced_at_once(self, plan, make_pod):
        result = plan(1, [make_pod(0, container={"restarts": 3})], avoided=["node-1"])
        assert (result.create, names(result.delete)) == (((0, 1),), ["demo-0-0-0"])

    @pytest.mark.parametrize(
        "pod", [{"ready": True}, {"container": {"restarts": 3, "started": True}}, {"container": {"restarts": 0}}]
    )
    def test_one_that_serves_is_up_or_has_not_failed_stays(self, plan, make_pod, pod):
        assert not plan(1, [make_pod(0, **({"container": {"restarts": 3}} | pod))], avoided=["node-1"])

    def test_its_replacement_is_made_once(self, plan, make_pod):
        pods = [make_pod(0, 0, container={"restarts": 3}), make_pod(0, 1, node="")]
        result = plan(1, pods, avoided=["node-1"])
        assert (result.create, names(result.delete)) == ((), ["demo-0-0-0"])


class TestPodsAboutToBeTakenAway:
    def test_a_successor_is_made_while_it_serves(self, plan, make_pod):
        result = plan(2, [make_pod(0, ready=True, leaving="spot"), make_pod(1, ready=True)])
        assert (result.create, result.delete) == (((0, 1),), ())

    def test_it_serves_until_its_successor_is_up(self, plan, make_pod):
        pods = [make_pod(0, ready=True, leaving="spot"), make_pod(0, 1), make_pod(1, ready=True)]
        assert not plan(2, pods)
        pods[1] = make_pod(0, 1, container={"started": True})
        assert names(plan(2, pods).delete) == ["demo-0-0-0"]

    def test_the_last_engine_that_serves_stays_to_the_end(self, plan, make_pod):
        pods = [make_pod(0, ready=True, leaving="spot"), make_pod(0, 1, container={"started": True})]
        assert not plan(1, pods)
        result = plan(1, [make_pod(0, ready=True, leaving="spot", terminating=True), pods[1]])
        assert not result

    def test_a_successor_that_is_about_to_be_taken_too_takes_over_from_nobody_and_has_no_successor(
        self, plan, make_pod
    ):
        up = make_pod(0, 1, leaving="spot", container={"started": True})
        assert not plan(2, [make_pod(0, ready=True, leaving="spot"), up, make_pod(1, ready=True)])

    def test_one_that_does_not_serve_is_left_to_its_end(self, plan, make_pod):
        assert not plan(1, [make_pod(0, leaving="spot")])

    def test_the_roster_tells_the_sync_job_who_is_leaving_and_who_is_retired(self, make_pod):
        goal = EngineGoal(3, "new", retired=frozenset({1}))
        roster = plan_roster("demo", "uid", goal, [make_pod(0, leaving="spot"), make_pod(1), make_pod(2)])
        assert [(member.engine, member.leaving) for member in roster.members] == [(0, True), (2, False)]
        assert (roster.engines, roster.retired, roster.missing) == (2, (1,), ())
