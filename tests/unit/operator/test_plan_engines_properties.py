"""What holds of engine plans whatever is observed, and of rollouts whatever the order in which pods become Ready."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet_operator.plan.engines import EngineGoal, EnginePlan, current_pods, plan_engines
from rolloutfleet_operator.plan.observed import ContainerState, Pod
from rolloutfleet_operator.plan.roster import plan_roster

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ENGINES = st.integers(0, 5)
CONTAINERS = (ContainerState(), ContainerState(started=True), ContainerState(restarts=3))


@st.composite
def pods(draw):
    keys = draw(st.lists(st.tuples(ENGINES, st.integers(0, 4)), unique=True, max_size=12))
    return [
        Pod(
            name=f"demo-{engine}-0-{incarnation}",
            uid=f"uid-{engine}-{incarnation}",
            owner_uid="fleet-uid",
            role="leader",
            phase=draw(st.sampled_from(["Pending", "Running", "Running", "Running", "Failed"])),
            created=NOW - timedelta(seconds=draw(st.sampled_from([0, 3, 3600]))),
            ready=draw(st.booleans()),
            terminating=draw(st.sampled_from([False, False, True])),
            engine=engine,
            incarnation=incarnation,
            revision=draw(st.sampled_from(["old", "new"])),
            node=draw(st.sampled_from(["good", "bad"])),
            leaving=draw(st.sampled_from(["", "", "spot"])),
            container=draw(st.sampled_from(CONTAINERS)),
        )
        for engine, incarnation in keys
    ]


goals = st.builds(
    EngineGoal,
    engines=ENGINES,
    revision=st.just("new"),
    may_disrupt=st.booleans(),
    retired=st.sampled_from([frozenset(), frozenset(), frozenset({0}), frozenset({1, 3})]),
    avoided=st.sampled_from([frozenset(), frozenset({"bad"})]),
)


def carried_out(own: list[Pod], plan: EnginePlan, *, gone: bool = True) -> list[Pod]:
    """The pods after the plan; those that were ended are gone, or still on their way out."""
    ended = {pod.uid for pod in plan.delete}
    left = [replace(pod, terminating=True) if pod.uid in ended else pod for pod in own]
    born = [
        Pod(
            name=f"demo-{engine}-0-{incarnation}",
            uid=f"uid-{engine}-{incarnation}",
            owner_uid="fleet-uid",
            role="leader",
            phase="Pending",
            created=NOW,
            engine=engine,
            incarnation=incarnation,
            revision="new",
        )
        for engine, incarnation in plan.create
    ]
    return [pod for pod in left if not (gone and pod.terminating)] + born


def serving(own: list[Pod], engines: int) -> set[int]:
    return {pod.engine for pod in own if pod.live and pod.ready and pod.engine < engines}


@given(goals, pods(), st.randoms())
def test_the_order_in_which_pods_are_seen_does_not_matter(goal, own, random):
    shuffled = list(own)
    random.shuffle(shuffled)
    assert plan_engines(goal, own, [], NOW) == plan_engines(goal, shuffled, [], NOW)
    assert plan_roster("demo", "u", goal, own) == plan_roster("demo", "u", goal, shuffled)


@given(goals, pods())
def test_at_most_one_engine_stops_serving_by_our_doing_and_only_when_all_others_serve(goal, own):
    plan = plan_engines(goal, own, [], NOW)
    before = serving(own, goal.engines) & set(goal.wanted)
    lost = before - serving(carried_out(own, plan), goal.engines)
    assert len(lost) <= 1
    if lost:
        leaving = {pod.engine for pod in plan.delete if pod.leaving}
        assert goal.may_disrupt or lost <= leaving
        assert before == set(goal.wanted)


@given(goals, pods())
def test_a_retired_engine_has_no_pod_that_stays_and_gets_none(goal, own):
    plan = plan_engines(goal, own, [], NOW)
    assert not goal.retired & {engine for engine, _ in plan.create}
    assert not [pod for pod in carried_out(own, plan) if pod.engine in goal.retired and not pod.terminating]


@given(goals, pods(), st.booleans())
def test_planning_again_on_what_was_planned_changes_nothing(goal, own, gone):
    after = carried_out(own, plan_engines(goal, own, [], NOW), gone=gone)
    assert not plan_engines(goal, after, [], NOW)


@given(goals, pods())
def test_a_new_pod_never_takes_a_name_that_exists(goal, own):
    taken = {(pod.engine, pod.incarnation) for pod in own}
    plan = plan_engines(goal, own, [], NOW)
    assert not taken & set(plan.create)
    assert len({engine for engine, _ in plan.create}) == len(plan.create)


@given(goals, pods())
def test_interrupted_between_ending_and_making_it_is_made_up_for(goal, own):
    plan = plan_engines(goal, own, [], NOW)
    half = carried_out(own, EnginePlan(delete=plan.delete))
    finished = carried_out(half, plan_engines(goal, half, [], NOW))
    assert set(current_pods(finished)) >= {engine for engine, _ in plan.create}


@settings(max_examples=60)
@given(st.integers(1, 6), st.data())
def test_a_rollout_ends_and_never_has_more_than_one_engine_down(engines, data):
    goal = EngineGoal(engines, "new")
    own = [
        Pod(f"demo-{e}-0-0", f"uid-{e}-0", "fleet-uid", "leader", "Running", NOW, ready=True, engine=e, revision="old")
        for e in range(engines)
    ]
    for _ in range(4 * engines):
        own = carried_out(own, plan_engines(goal, own, [], NOW), gone=data.draw(st.booleans()))
        assert len(serving(own, engines)) >= engines - 1
        waiting = sorted(pod.uid for pod in own if pod.live and not pod.ready)
        if waiting and data.draw(st.booleans()):
            own = [replace(pod, ready=True) if pod.uid == waiting[0] else pod for pod in own]
    own = [replace(pod, ready=pod.live or pod.ready) for pod in own]
    for _ in range(engines + 1):
        own = [replace(pod, ready=True) for pod in carried_out(own, plan_engines(goal, own, [], NOW))]
    assert {pod.revision for pod in own} == {"new"}
    assert len(own) == engines


@given(pods(), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_scaling_up_and_down_ends_with_one_pod_per_engine(own, sizes):
    for size in sizes:
        goal = EngineGoal(size, "new")
        for _ in range(12):
            own = [
                replace(pod, ready=pod.live)
                for pod in carried_out(own, plan_engines(goal, own, [], NOW + timedelta(hours=1)))
            ]
        assert {pod.engine for pod in own if pod.live} == set(range(size))
        # One that is about to be taken away is kept beside a successor that is no better off.
        once = [engine for engine in range(size) if not all(pod.leaving for pod in own if pod.engine == engine)]
        assert sorted(pod.engine for pod in own if pod.live and pod.engine in once) == once
