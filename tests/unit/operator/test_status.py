"""What a fleet says of itself."""

from datetime import timedelta

import pytest

from rolloutfleet_operator.api.conditions import Reason
from rolloutfleet_operator.api.fleetstatus import RolloutFleetStatus, Weights
from rolloutfleet_operator.api.weightsync import Intent, LastRefit, MemberCounts, WeightSyncStatus
from rolloutfleet_operator.plan.engines import EngineGoal
from rolloutfleet_operator.plan.fit import Fit
from rolloutfleet_operator.plan.observed import WeightSync
from rolloutfleet_operator.status.conditions import condition_events
from rolloutfleet_operator.status.fleet import Fault, FleetFacts, summarize_fault, summarize_fleet
from rolloutfleet_operator.status.troubles import pod_trouble, worst_trouble
from rolloutfleet_operator.status.weights import fold_weights, weights_events
from rolloutfleet_operator.status.weightsync import active_condition, judge_fleetless, judge_turn

NO_STATUS = RolloutFleetStatus()


@pytest.fixture
def facts(identity, make_spec, make_pod):
    def make(pods=(), *, spec=None, **fields):
        spec = make_spec(replicas=2, **(spec or {}))
        given = {
            "fleet": identity,
            "generation": 3,
            "spec": spec,
            "goal": EngineGoal(spec.engines, "new"),
            "current": {pod.engine: pod for pod in pods},
            "dead": [],
            "fit": Fit(True, ""),
            "sync_pods": [make_pod(name="demo-sync-x", role="sync", ready=True)],
            "sync_waits": "",
            "weights": Weights(),
            "reported": True,
        }
        return FleetFacts(**given | fields)

    return make


@pytest.fixture
def conditions(now):
    def read(facts):
        status = summarize_fleet(facts, NO_STATUS, now)
        return {c.type: (c.status, c.reason, c.message) for c in status.conditions}

    return read


@pytest.fixture
def serving(make_pod):
    started = {"started": True}
    return [make_pod(0, ready=True, container=started), make_pod(1, ready=True, container=started)]


def test_all_is_well(facts, conditions, serving):
    assert conditions(facts(serving)) == {
        "Ready": ("True", "AllEnginesReady", "2 of 2 engines serve"),
        "Reconciling": ("False", "Settled", "nothing is under way"),
        "Stalled": ("False", "Settled", "nothing needs anyone's help"),
        "PlacementSatisfied": ("True", "Placed", "2 of 2 engines have a node"),
        "WeightsCurrent": ("True", "Current", "every engine holds version 0"),
    }


class TestWhyNotReady:
    def check(self, seen, reason, message, *, stalled=False):
        assert seen["Ready"] == ("False", reason, message)
        assert seen["Reconciling"][0] == ("False" if stalled else "True")
        assert seen["Stalled"][0] == ("True" if stalled else "False")

    def test_pods_are_being_made(self, facts, conditions, serving):
        seen = conditions(facts(serving[:1]))
        self.check(seen, "EnginesStarting", "1 engine pods are being made; 1 of 2 engines serve")

    def test_an_image_is_being_pulled_and_that_is_no_failure(self, facts, conditions, serving, make_pod):
        pulling = make_pod(1, phase="Pending", container={"waiting_reason": "ContainerCreating"})
        seen = conditions(facts([serving[0], pulling]))
        self.check(seen, "EnginesStarting", "pod demo-1-0-0 pulls its image; 1 of 2 engines serve")

    def test_an_engine_ends_again_and_again_and_its_own_words_are_told(self, facts, conditions, serving, make_pod):
        words = "ValueError: Head size 16 is not supported"
        crashing = make_pod(1, container={"restarts": 2, "exit_code": 1, "exit_message": words})
        seen = conditions(facts([serving[0], crashing]))
        told = f"pod demo-1-0-0 was restarted 2 times: exit code 1: {words}; 1 of 2 engines serve"
        self.check(seen, "EngineFailing", told, stalled=True)

    def test_one_restart_is_not_yet_hopeless(self, facts, conditions, serving, make_pod):
        crashed = make_pod(1, container={"restarts": 1, "exit_code": 137, "exit_reason": "OOMKilled"})
        seen = conditions(facts([serving[0], crashed]))
        told = "pod demo-1-0-0 was restarted once: exit code 137: OOMKilled; 1 of 2 engines serve"
        self.check(seen, "EngineFailing", told)

    def test_no_node_is_free_and_the_schedulers_words_are_told(self, facts, conditions, serving, make_pod):
        pending = make_pod(1, phase="Pending", node="", unschedulable="0/3 nodes are available")
        seen = conditions(facts([serving[0], pending]))
        self.check(seen, "Unschedulable", "pod demo-1-0-0: 0/3 nodes are available; 1 of 2 engines serve")
        told = "pod demo-1-0-0: 0/3 nodes are available; 1 of 2 engines have a node"
        assert seen["PlacementSatisfied"] == ("False", "Unschedulable", told)

    def test_no_node_fits_and_both_numbers_are_told(self, facts, conditions, make_pod, serving):
        no_fit = Fit(
            False, "parallelism asks for 16 GPUs on one node but the largest node offers 8 nvidia.com/gpu (node x)"
        )
        old = [make_pod(e, ready=True, revision="old") for e in range(2)]
        seen = conditions(facts(old, fit=no_fit))
        self.check(seen, "NoNodeFits", f"{no_fit.message}; 2 of 2 engines serve")
        assert seen["PlacementSatisfied"] == ("False", "NoNodeFits", no_fit.message)

    def test_the_sync_pod_is_missing(self, facts, conditions, serving):
        seen = conditions(facts(serving, sync_pods=[], sync_waits="Job demo-sync-a to end"))
        self.check(seen, "SyncNotReady", "the sync job waits for Job demo-sync-a to end; 2 of 2 engines serve")

    def test_the_sync_pod_fails(self, facts, conditions, serving, make_pod):
        failing = make_pod(name="demo-sync-x", container={"restarts": 4, "exit_code": 1, "exit_message": "no policy"})
        seen = conditions(facts(serving, sync_pods=[failing]))
        told = "sync pod demo-sync-x was restarted 4 times: exit code 1: no policy; 2 of 2 engines serve"
        self.check(seen, "SyncFailing", told, stalled=True)

    def test_random_weights_wait_for_the_first_refit(self, facts, conditions, make_pod):
        up = [make_pod(e, container={"started": True}) for e in range(2)]
        seen = conditions(facts(up, spec={"model": {"name": "m", "loadFormat": "Dummy"}}))
        told = "model.loadFormat is Dummy, so the engines serve after the first refit; 0 of 2 engines serve"
        self.check(seen, "AwaitingFirstRefit", told)
        assert seen["WeightsCurrent"][:2] == ("False", "AwaitingFirstRefit")

    def test_a_late_engine_waits_for_the_next_refit(self, facts, conditions, serving, make_pod):
        late = make_pod(1, container={"started": True})
        seen = conditions(facts([serving[0], late], weights=Weights(version=7, skew=1)))
        told = (
            "an engine that does not hold version 7 takes it over from a peer, or waits for the next refit; "
            "1 of 2 engines serve"
        )
        self.check(seen, "AwaitingNextRefit", told)
        assert seen["WeightsCurrent"] == ("False", "EnginesBehind", "1 of 2 engines do not hold version 7")

    def test_engines_that_sleep_are_no_late_engines(self, facts, conditions, make_pod):
        asleep = [make_pod(e, container={"started": True}) for e in range(2)]
        seen = conditions(facts(asleep, weights=Weights(version=7, asleep=2)))
        self.check(seen, "EnginesAsleep", "a trainer has put 2 engines to sleep; 0 of 2 engines serve")
        assert seen["WeightsCurrent"][0] == "True"

    def test_an_update_is_under_way(self, facts, conditions, serving, make_pod):
        old = make_pod(1, ready=True, revision="old")
        seen = conditions(facts([serving[0], old]))
        self.check(seen, "EnginesUpdating", "1 of 2 engines still have an older revision; 2 of 2 engines serve")

    def test_an_update_keeps_its_reason_while_a_new_engine_starts(self, facts, conditions, make_pod):
        old, new = make_pod(0, ready=True, revision="old"), make_pod(1, container={})
        seen = conditions(facts([old, new]))
        told = "1 of 2 engines still have an older revision; pod demo-1-0-0 loads its model; 1 of 2 engines serve"
        self.check(seen, "EnginesUpdating", told)

    def test_a_suspended_fleet_is_at_rest(self, facts, conditions):
        seen = conditions(facts([], spec={"suspend": True}))
        assert seen["Ready"][:2] == ("False", "Suspended")
        assert seen["Reconciling"][0] == seen["Stalled"][0] == "False"
        assert seen["WeightsCurrent"][:2] == ("Unknown", "NothingRuns")

    def test_failing_engines_are_told_before_those_that_start(self, make_pod):
        starting = make_pod(0, container={})
        failing = make_pod(5, container={"waiting_reason": "InvalidImageName", "waiting_message": "no"})
        trouble = worst_trouble([starting, failing, make_pod(6, container={"waiting_reason": "ErrImagePull"})])
        assert (trouble.reason, trouble.message) == (
            Reason.IMAGE_PULL_FAILING,
            "pod demo-5-0-0: InvalidImageName: no (and 1 more)",
        )


@pytest.mark.parametrize(
    ("state", "fields", "reason", "stalled", "message"),
    [
        (
            {"waiting_reason": "ErrImagePull", "waiting_message": "denied"},
            {},
            "ImagePullFailing",
            True,
            "ErrImagePull: denied",
        ),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "x" not found'},
            {},
            "EngineFailing",
            True,
            'CreateContainerConfigError: secret "x" not found',
        ),
        ({}, {"node": ""}, "EnginesStarting", False, "waits for a node"),
        ({}, {"sandbox_missing": True}, "EnginesStarting", False, "kubectl describe pod demo-0-0-0"),
        ({}, {}, "EnginesStarting", False, "loads its model"),
        (
            {"exit_reason": "Evicted"},
            {"phase": "Failed"},
            "EngineFailing",
            False,
            "ended: Evicted; another takes its place",
        ),
    ],
)
def test_troubles_of_a_pod(make_pod, state, fields, reason, stalled, message):
    trouble = pod_trouble(make_pod(0, container=state, **fields))
    assert (trouble.reason, trouble.stalled) == (reason, stalled)
    assert message in trouble.message


def test_an_engine_that_is_up_again_is_not_blamed_for_its_past(make_pod):
    assert pod_trouble(make_pod(0, container={"started": True, "restarts": 5, "exit_code": 1})) is None
    crashed = {"started": False, "restarts": 5, "exit_code": 1, "waiting_reason": "CrashLoopBackOff"}
    assert pod_trouble(make_pod(0, container=crashed)).stalled


def test_a_pod_that_has_started_and_waits_to_be_admitted_is_in_no_trouble(make_pod):
    assert pod_trouble(make_pod(0, container={"started": True})) is None


class TestFolding:
    def test_the_transition_time_moves_only_when_the_status_flips(self, facts, serving, now):
        first = summarize_fleet(facts(serving[:1]), NO_STATUS, now)
        second = summarize_fleet(facts([]), first, now + timedelta(minutes=1))
        third = summarize_fleet(facts(serving), second, now + timedelta(minutes=2))
        times = [ready(status).last_transition_time for status in (first, second, third)]
        assert times == ["2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z", "2026-01-02T03:06:05Z"]

    def test_nothing_new_gives_an_equal_status(self, facts, serving, now):
        first = summarize_fleet(facts(serving), NO_STATUS, now)
        assert summarize_fleet(facts(serving), first, now + timedelta(hours=1)) == first

    def test_counts_and_addresses(self, facts, serving, make_pod, now):
        status = summarize_fleet(facts([serving[0], make_pod(1, revision="old")]), NO_STATUS, now)
        assert (status.replicas, status.ready_replicas, status.updated_replicas) == (2, 1, 1)
        assert status.observed_generation == 3
        assert status.label_selector == "rolloutfleet.io/fleet=demo,rolloutfleet.io/role=leader"
        assert status.endpoints.engines == ("http://demo-0-0-0.demo-engines.rl.svc:8000",)
        assert status.endpoints.sync == "http://demo-sync.rl.svc:8080"

    def test_a_fault_keeps_counts_and_says_why(self, facts, serving, now):
        before = summarize_fleet(facts(serving), NO_STATUS, now)
        status = summarize_fault(before, before, Fault(Reason.INVALID_SPEC, "wrong", stalled=True), 4, now)
        seen = {c.type: (c.status, c.reason) for c in status.conditions}
        assert seen["Ready"] == ("False", "InvalidSpec")
        assert seen["Stalled"] == ("True", "InvalidSpec")
        assert seen["PlacementSatisfied"] == ("True", "Placed")
        assert (status.ready_replicas, status.observed_generation) == (2, 4)


def ready(status):
    return next(c for c in status.conditions if c.type == "Ready")


class TestEvents:
    def test_are_told_when_a_reason_changes_and_not_again(self, facts, serving, now):
        first = summarize_fleet(facts([]), NO_STATUS, now)
        assert [e.reason for e in condition_events((), first.conditions)] == ["EnginesStarting"]
        assert condition_events(first.conditions, first.conditions) == ()
        second = summarize_fleet(facts(serving), first, now)
        assert [(e.warning, e.reason) for e in condition_events(first.conditions, second.conditions)] == [
            (False, "AllEnginesReady")
        ]

    def test_a_stalled_fleet_warns_once(self, facts, make_pod, now):
        broken = make_pod(0, container={"waiting_reason": "InvalidImageName"})
        status = summarize_fleet(facts([broken]), NO_STATUS, now)
        assert [(e.warning, e.reason) for e in condition_events((), status.conditions)] == [(True, "ImagePullFailing")]

    def test_a_failed_refit_warns_with_phase_and_member(self):
        refit = LastRefit(version=8, outcome="Failed", phase="Transferring", member="demo-1-0-0", message="gone")
        (event,) = weights_events(Weights(), Weights(last_refit=refit))
        assert event.message == "refit to version 8 failed while Transferring at demo-1-0-0: gone"
        assert weights_events(Weights(last_refit=refit), Weights(last_refit=refit)) == ()


class TestWeights:
    def test_never_fall_whichever_weightsync_is_deleted(self):
        before = Weights(epoch=5, version=8)
        folded = fold_weights(before, [WeightSyncStatus(epoch=1, version=2)], None)
        assert (folded.epoch, folded.version) == (5, 8)

    def test_are_the_highest_of_all_reports(self):
        reports = [WeightSyncStatus(epoch=9, version=1), WeightSyncStatus(epoch=2, version=4)]
        folded = fold_weights(None, reports, reports[1])
        assert (folded.epoch, folded.version, folded.target, folded.skew) == (9, 4, 4, 0)

    def test_follow_the_refit_under_way(self):
        report = WeightSyncStatus(
            epoch=2, version=4, intent=Intent(epoch=3, version=5), members=MemberCounts(total=4, admitted=3)
        )
        folded = fold_weights(None, [report], report)
        assert (folded.epoch, folded.version, folded.target, folded.skew) == (3, 4, 5, 1)

    def test_keep_the_last_refit_of_a_weightsync_that_is_gone(self):
        refit = LastRefit(version=4, outcome="Complete")
        assert fold_weights(Weights(last_refit=refit), [], None).last_refit == refit


class TestTurns:
    @pytest.fixture
    def sync(self, now):
        def make(name, status=None):
            return WeightSync(name, f"uid-{name}", 2, now, False, 0, 0, status or {})

        return make

    def test_one_waits_for_the_other_by_name(self, sync):
        verdict = judge_turn(sync("b"), sync("a"), "demo")
        assert (verdict.status, verdict.reason) == ("False", "WaitingForTurn")
        assert "WeightSync a of fleet demo is older and active" in verdict.message

    def test_the_active_one_serves(self, sync):
        assert judge_turn(sync("a"), sync("a"), "demo").status == "True"

    def test_without_a_fleet_it_says_which_is_missing(self):
        verdict = judge_fleetless("demo", "rl")
        assert verdict.message == "fleetRef.name is demo but namespace rl has no RolloutFleet of that name"

    def test_is_written_once(self, sync, now):
        verdict = judge_turn(sync("a"), sync("a"), "demo")
        condition = active_condition(sync("a"), verdict, now)
        stored = {"conditions": [condition.body(), {"type": "Ready", "status": "True"}]}
        assert active_condition(sync("a", stored), verdict, now + timedelta(hours=1)) is None
