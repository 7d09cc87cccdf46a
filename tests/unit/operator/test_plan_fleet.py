"""Fit, sync Jobs, turns of WeightSyncs, and the roster."""

import pytest

from rolloutfleet_operator.plan.engines import EngineGoal
from rolloutfleet_operator.plan.fit import plan_fit
from rolloutfleet_operator.plan.observed import Job, Node, WeightSync
from rolloutfleet_operator.plan.roster import plan_roster
from rolloutfleet_operator.plan.sync import plan_active, plan_floor, plan_sync_job

GPU = "nvidia.com/gpu"


@pytest.mark.row("A26")
@pytest.mark.parametrize(
    ("gpus", "pods", "nodes", "fits", "message"),
    [
        (
            16,
            1,
            [("a", 4), ("x", 8)],
            False,
            (
                f"parallelism asks for 16 GPUs on one node but the largest node offers 8 {GPU} (node x); spread engines over more nodes by "
                "parallelism.gpusPerNode"
            ),
        ),
        (8, 1, [("a", 4), ("x", 8)], True, f"node x offers 8 {GPU}"),
        (2, 1, [("b", 8), ("a", 8)], True, f"node a offers 8 {GPU}"),
        (1, 1, [], False, "parallelism asks for 1 GPU on one node but the cluster has no node"),
        (
            1,
            1,
            [("a", 0)],
            False,
            f"parallelism asks for 1 GPU on one node but the largest node offers 0 {GPU} (node a)",
        ),
        (8, 2, [("a", 8), ("b", 8)], True, f"node a offers 8 {GPU}"),
        (
            8,
            2,
            [("a", 16), ("b", 4)],
            False,
            "parallelism asks for 8 GPUs on each of 2 nodes but nodes with as many: 1",
        ),
    ],
)
def test_fit_names_both_numbers_and_the_node(gpus, pods, nodes, fits, message):
    fit = plan_fit(gpus, pods, GPU, [Node(name, ((GPU, amount),)) for name, amount in nodes])
    assert (fit.fits, fit.message) == (fits, message)


def test_engines_on_cpus_fit_anywhere():
    assert plan_fit(64, 1, "", []).fits is True


def test_nodes_that_may_not_be_read_leave_it_to_the_scheduler():
    assert plan_fit(64, 1, GPU, None).fits is None


class TestSyncJob:
    def test_is_made_when_none_is_there(self):
        assert plan_sync_job("demo-sync-a", "fleet-uid", [], []).create

    def test_is_left_alone_while_it_runs(self):
        plan = plan_sync_job("demo-sync-a", "fleet-uid", [job("demo-sync-a")], [])
        assert (plan.create, plan.delete) == (False, ())

    def test_of_another_template_goes_before_the_new_one_comes(self):
        plan = plan_sync_job("demo-sync-b", "fleet-uid", [job("demo-sync-a")], [])
        assert (plan.create, [j.name for j in plan.delete], plan.waiting_for) == (
            False,
            ["demo-sync-a"],
            "Job demo-sync-a to end",
        )

    @pytest.mark.parametrize("finished", ["Failed", "Complete"])
    def test_that_has_ended_is_made_anew(self, finished):
        plan = plan_sync_job("demo-sync-a", "fleet-uid", [job("demo-sync-a", finished=finished)], [])
        assert (plan.create, [j.name for j in plan.delete]) == (False, ["demo-sync-a"])

    def test_waits_for_the_last_pod_of_its_predecessor_to_begin_its_end(self, make_pod):
        old = make_pod(name="demo-sync-a-x", role="sync")
        waiting = plan_sync_job("demo-sync-b", "fleet-uid", [], [old])
        assert (waiting.create, waiting.waiting_for) == (False, "sync pod demo-sync-a-x of a former Job to end")
        ending = make_pod(name="demo-sync-a-x", role="sync", terminating=True)
        assert plan_sync_job("demo-sync-b", "fleet-uid", [], [ending]).create

    def test_goes_when_none_is_wanted(self):
        plan = plan_sync_job("", "fleet-uid", [job("demo-sync-a")], [])
        assert (plan.create, len(plan.delete)) == (False, 1)

    def test_of_another_owner_is_never_touched(self):
        assert plan_sync_job("", "fleet-uid", [job("demo-sync-a", owner_uid="other")], []).delete == ()


def job(name, **fields):
    return Job(**{"name": name, "uid": f"uid-{name}", "owner_uid": "fleet-uid"} | fields)


@pytest.fixture
def sync(now):
    def make(name, **fields):
        given = {"uid": f"uid-{name}", "generation": 1, "created": now, "terminating": False, "status": {}}
        return WeightSync(**{"name": name, "floor_epoch": 0, "floor_version": 0} | given | fields)

    return make


def test_the_oldest_weightsync_that_stays_is_active(sync, now):
    older = sync("z", created=now.replace(year=2025))
    assert plan_active([sync("a"), older]) is older
    assert plan_active([sync("a"), sync("z", created=now.replace(year=2025), terminating=True)]).name == "a"
    assert plan_active([sync("b"), sync("a")]).name == "a"
    assert plan_active([]) is None


def test_of_weightsyncs_made_in_one_second_the_one_that_has_the_turn_keeps_it(sync):
    active = sync("b", status={"conditions": [{"type": "Active", "status": "True"}]})
    waiting = sync(
        "a", status={"conditions": [{"type": "Active", "status": "False"}, {"type": "Ready", "status": "True"}]}
    )
    assert plan_active([waiting, active]) is active


def test_a_weightsync_that_takes_over_starts_from_what_the_fleet_has(sync):
    assert plan_floor(sync("a"), 4, 7) == (4, 7)
    assert plan_floor(sync("a", floor_epoch=9, floor_version=7), 4, 7) is None
    assert plan_floor(sync("a", status={"epoch": 5, "version": 2}), 4, 7) == (5, 7)


@pytest.mark.row("A21")
def test_the_roster_lists_one_leader_per_engine_by_engine_with_its_ranks(make_pod):
    pods = [
        make_pod(1, 2, revision="old", ranks=4, address=""),
        make_pod(0, 0, terminating=True, ready=True),
        make_pod(0, 1),
        make_pod(2, phase="Failed"),
        make_pod(7),
    ]
    roster = plan_roster("demo", "fleet-uid", EngineGoal(3, "new"), pods)
    assert roster.engines == 3
    assert [(m.engine, m.pod_name, m.address, m.ranks) for m in roster.members] == [
        (0, "demo-0-0-1", "10.0.0.1", 1),
        (1, "demo-1-0-2", "", 4),
    ]
