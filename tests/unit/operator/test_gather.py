"""Engines of several pods are decided about as one, and their pods come and go together."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet_operator.plan.engines import EngineGoal, plan_engines
from rolloutfleet_operator.plan.gather import every_pod, gather_engines, missing_ranks
from rolloutfleet_operator.plan.observed import ContainerState, Pod

NOW = datetime(2026, 1, 2, tzinfo=UTC)
GOAL = EngineGoal(1, "new")


def part(rank: int, *, engine: int = 0, incarnation: int = 0, pods: int = 2, **fields) -> Pod:
    name = f"demo-{engine}-{rank}-{incarnation}"
    given = {
        "role": "follower" if rank else "leader",
        "phase": "Running",
        "created": NOW - timedelta(hours=1),
        "ready": True,
        "address": f"10.0.{engine}.{rank}",
        "node": f"node-{rank}",
        "revision": "new",
        "ranks": 8,
    } | fields
    return Pod(name, f"uid-{name}", "fleet-uid", engine=engine, rank=rank, incarnation=incarnation, pods=pods, **given)


def only(*pods: Pod) -> Pod:
    (engine,) = gather_engines(pods)
    return engine


def test_an_engine_of_one_pod_is_its_pod():
    pod = part(0, pods=1)
    assert only(pod) is pod
    assert every_pod(pod) == (pod,)


def test_the_leader_stands_for_an_engine_and_is_ready_when_all_of_it_is():
    engine = only(part(1), part(0))
    assert (engine.name, engine.address, engine.ready, engine.ranks) == ("demo-0-0-0", "10.0.0.0", True, 8)
    assert [pod.rank for pod in every_pod(engine)] == [0, 1]
    assert not only(part(0), part(1, ready=False)).ready
    assert not only(part(0)).ready


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"phase": "Failed"}, lambda engine: engine.dead),
        ({"terminating": True}, lambda engine: engine.terminating and not engine.live),
        ({"leaving": "spot"}, lambda engine: engine.leaving == "pod demo-0-1-0: spot"),
        ({"disrupted": True}, lambda engine: engine.disrupted),
        ({"sandbox_missing": True, "mounts": "folder /m"}, lambda engine: engine.mounts == "folder /m"),
        (
            {"node": "", "unschedulable": "0/2 nodes"},
            lambda engine: engine.unschedulable == "pod demo-0-1-0: 0/2 nodes",
        ),
        ({"node": ""}, lambda engine: engine.node == ""),
    ],
)
def test_what_befalls_a_follower_befalls_the_engine(fields, holds):
    assert holds(only(part(0), part(1, **fields)))


@pytest.mark.row("A21")
def test_restarts_of_its_pods_are_one_restart_on_the_node_of_the_one_that_failed():
    ended = NOW - timedelta(minutes=5)
    leader = part(
        0, container=ContainerState(restarts=1, exit_message="pod demo-0-1-0 of the engine: gone", ended_at=ended)
    )
    follower = part(1, container=ContainerState(restarts=2, exit_message="vLLM ended", ended_at=NOW))
    engine = only(leader, follower)
    assert (engine.container.restarts, engine.container.exit_message) == (2, "vLLM ended")
    assert (engine.node, engine.container.ended_at) == ("node-1", NOW)
    equal = only(leader, replace(follower, container=replace(follower.container, restarts=1)))
    assert equal.container.exit_message == "pod demo-0-1-0 of the engine: gone"


def test_an_evicted_pod_is_no_failure_of_the_engine_unless_another_failed_by_itself():
    evicted = part(0, phase="Failed", disrupted=True)
    assert only(evicted, part(1)).disrupted
    assert only(evicted, part(1, phase="Succeeded")).phase == "Succeeded"


def test_a_pod_that_is_missing_is_made_again_beside_those_that_stay():
    plan = plan_engines(GOAL, gather_engines([part(0)]), [], NOW)
    assert (plan.create, plan.complete, plan.delete) == ((), ((0, 0, 1),), ())
    assert missing_ranks(only(part(1))) == (0,)


@pytest.mark.scenario("F72")
@pytest.mark.parametrize("end", [{"phase": "Failed"}, {"terminating": True}])
def test_an_engine_that_lost_a_pod_for_good_is_replaced_whole(end):
    own = gather_engines([part(0), part(1, **end)])
    plan = plan_engines(GOAL, own, [], NOW)
    assert (plan.create, plan.complete) == (((0, 1),), ())
    going = [pod.name for engine in plan.delete for pod in every_pod(engine) if not pod.terminating]
    assert "demo-0-0-0" in going


def test_nothing_is_ended_twice():
    own = gather_engines(
        [part(0, terminating=True), part(1, terminating=True), part(0, incarnation=1), part(1, incarnation=1)]
    )
    assert not plan_engines(GOAL, own, [], NOW)


ends = st.sampled_from([{}, {}, {"ready": False}, {"phase": "Failed"}, {"terminating": True}, {"leaving": "spot"}])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), ends), unique_by=lambda p: p[:3]))
def test_whatever_there_is_whole_engines_are_the_end(parts):
    pods = [part(rank, engine=e, incarnation=i, pods=3, **fields) for e, rank, i, fields in parts]
    goal = EngineGoal(2, "new")
    for _ in range(8):
        plan = plan_engines(goal, gather_engines(pods), [], NOW + timedelta(hours=1))
        ended = {pod.uid for engine in plan.delete for pod in every_pod(engine)}
        made = [(engine, i, rank) for engine, i in plan.create for rank in range(3)] + list(plan.complete)
        taken = {pod.name for pod in pods}
        pods = [pod for pod in pods if pod.uid not in ended and not pod.terminating]
        fresh = [part(rank, engine=engine, incarnation=i, pods=3) for engine, i, rank in made]
        assert not taken & {pod.name for pod in fresh}
        pods = [replace(pod, ready=pod.live) for pod in (*pods, *fresh)]
    left = [engine for engine in gather_engines(pods) if engine.live and not engine.leaving]
    assert {engine.engine for engine in gather_engines(pods) if engine.ready} == {0, 1}
    assert all(len(every_pod(engine)) == 3 for engine in left)
