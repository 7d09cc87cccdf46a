"""The worker's fence: which calls it accepts, and that it never lets anything but one committed version generate."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Admit, WorkerState
from rolloutfleet_worker.fence import Door, Fence, Identity

IDENTITY = Identity(fleet="f", fleet_uid="fleet-uid", pod_name="f-0-0-0", pod_uid="pod-uid", instance="one")


def serving(version: int = 0) -> Fence:
    return Fence(identity=IDENTITY, state=WorkerState.SERVING, version=version, admitted=version, message="")


def call(epoch: int = 0, fleet: str = "fleet-uid", pod: str = "pod-uid", instance: str = "one") -> Admit:
    return Admit(fleet_uid=fleet, pod_uid=pod, instance=instance, epoch=epoch, version=0)


def commit(fence: Fence, version: int) -> Fence:
    return fence.commit_begins(version).committed(version)


def received(version: int) -> Fence:
    return serving().join_done().paused().receive_begins(version).receive_done()


@pytest.mark.scenario("F77")
@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (call(fleet="other"), ProblemCode.WRONG_FLEET, "belongs to fleet f (uid fleet-uid), the call names uid other"),
        (call(pod="other"), ProblemCode.WRONG_POD, "this is pod f-0-0-0 (uid pod-uid), the call names uid other"),
        (
            call(instance="other"),
            ProblemCode.WRONG_POD,
            "this is instance one of pod f-0-0-0, the call names instance other",
        ),
    ],
)
def test_a_call_meant_for_another_fleet_or_pod_is_refused(wrong: Admit, code: ProblemCode, words: str):
    with pytest.raises(ProblemError, match=r"the call names (uid|instance) other") as refused:
        serving().accept(wrong)
    assert refused.value.code is code
    assert words in str(refused.value)


def test_an_older_epoch_is_refused_by_both_numbers():
    fence = serving().accept(call(epoch=7))
    with pytest.raises(ProblemError, match="epoch 6 is over, this worker has seen epoch 7"):
        fence.accept(call(epoch=6))


@pytest.mark.scenario("F04")
def test_a_newer_epoch_ends_the_membership_of_the_older_one():
    fence = serving().accept(call(epoch=1)).join_done()
    assert fence.joined
    assert not fence.accept(call(epoch=2)).joined


@pytest.mark.row("A20")
def test_a_started_worker_is_not_ready_before_it_is_admitted():
    fence = Fence(identity=IDENTITY).started()
    assert fence.unready_reason().startswith("AwaitingAdmission")
    assert fence.admit(0).unready_reason() == ""


@pytest.mark.scenario("F62")
def test_a_restarted_worker_stays_stale_until_the_fleets_version_is_committed_on_it():
    restarted = Fence(identity=IDENTITY).started().admit(7)
    assert restarted.unready_reason() == (
        "Stale: holds version 0, the fleet has committed version 7; waits for the next refit"
    )
    refitted = commit(restarted.join_done().paused().receive_begins(8).receive_done(), 8)
    assert refitted.unready_reason() == ""


def test_dummy_weights_are_never_served():
    fence = Fence(identity=IDENTITY, await_first_refit=True).started().admit(0)
    assert fence.unready_reason().startswith("AwaitingFirstRefit")
    assert commit(fence.join_done().paused().receive_begins(1).receive_done(), 1).unready_reason() == ""


@pytest.mark.scenario("F45")
def test_a_transfer_that_touched_weights_leaves_the_worker_dirty_and_its_version_unchanged():
    was = serving(3).join_done().paused()
    dirty = was.receive_begins(4).receive_failed(touched=True, was=was, message="peer lost")
    assert dirty.state is WorkerState.DIRTY
    assert dirty.version == 3
    assert "the transfer of version 4 ended half way: peer lost" in dirty.unready_reason()


def test_a_transfer_that_touched_nothing_leaves_the_old_version_whole():
    was = serving(3).join_done().paused()
    whole = was.receive_begins(4).receive_failed(touched=False, was=was, message="peer lost")
    assert whole.whole
    assert whole.unready_reason() == ""


@pytest.mark.scenario("F67")
def test_a_dirty_worker_refuses_to_resume():
    was = serving().join_done().paused()
    dirty = was.receive_begins(1).receive_failed(touched=True, was=was, message="x")
    with pytest.raises(ProblemError, match="resume needs the state"):
        dirty.resume_begins()
    assert not dirty.aborted("next").whole


@pytest.mark.scenario("F46")
def test_only_the_received_version_can_be_committed():
    with pytest.raises(ProblemError, match="cannot commit version 5: this worker holds version 4 in state Received"):
        commit(received(4), 5)
    with pytest.raises(ProblemError, match="cannot commit version 5: this worker holds version 0 in state Serving"):
        commit(serving(), 5)


def test_repeating_a_commit_changes_nothing():
    once = commit(received(4), 4)
    assert commit(once, 4) == once


def test_a_received_version_that_is_never_committed_is_not_served():
    aborted = received(4).aborted("the trainer is gone")
    assert aborted.state is WorkerState.DIRTY
    assert "version 4 was received but never committed: the trainer is gone" in aborted.unready_reason()


def test_weights_change_only_while_paused_and_joined():
    with pytest.raises(ProblemError, match="receive needs the state to be one of Dirty, Paused, it is Serving"):
        serving().join_done().receive_begins(1)
    with pytest.raises(ProblemError, match="has not joined a group in epoch 0"):
        serving().paused().receive_begins(1)


@pytest.mark.scenario("F52")
def test_a_cache_that_was_not_reset_fences_the_worker():
    fenced = received(2).commit_begins(2).cache_not_reset(2, "vLLM answered no")
    assert "the prefix cache could not be reset for version 2: vLLM answered no" in fenced.unready_reason()
    with pytest.raises(ProblemError, match="cannot commit version 2"):
        fenced.commit_begins(2)


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Calls in any order: the fence refuses or goes on, but never generates a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = Fence(identity=IDENTITY)
        self.whole = True
        self.holds = 0
        self.committed: set[int] = {0}

    def attempt(self, act):
        before = self.fence
        try:
            self.fence = act(before)
        except ProblemError:
            assert self.fence == before
            return False
        return True

    @rule()
    def start(self):
        self.attempt(lambda f: f.started())

    @rule(version=st.integers(0, 3))
    def admit(self, version):
        self.attempt(lambda f: f.admit(version))

    @rule()
    def join(self):
        if self.attempt(lambda f: f.join_begins()):
            self.attempt(lambda f: f.join_done())

    @rule()
    def pause(self):
        if self.attempt(lambda f: f.pause_begins()):
            self.attempt(lambda f: f.paused())

    @rule(version=st.integers(1, 3), outcome=st.sampled_from(["done", "touched", "untouched"]))
    def receive(self, version, outcome):
        was = self.fence
        if not self.attempt(lambda f: f.receive_begins(version)):
            return
        assert was.state in {WorkerState.PAUSED, WorkerState.DIRTY}
        assert self.fence.door is not Door.OPEN
        if outcome == "done":
            self.whole, self.holds = True, version
            self.attempt(lambda f: f.receive_done())
        else:
            self.whole = self.whole and outcome == "untouched"
            self.attempt(lambda f: f.receive_failed(touched=outcome == "touched", was=was, message="x"))

    @rule(version=st.integers(1, 3), cache_goes=st.booleans())
    def commit(self, version, cache_goes):
        if self.attempt(lambda f: f.commit_begins(version)):
            assert self.whole
            assert self.holds == version
            if cache_goes:
                self.committed.add(version)
                self.attempt(lambda f: f.committed(version))
            else:
                self.attempt(lambda f: f.cache_not_reset(version, "x"))

    @rule()
    def resume(self):
        if self.attempt(lambda f: f.resume_begins()):
            self.attempt(lambda f: f.resumed())

    @rule()
    def abort(self):
        self.attempt(lambda f: f.aborted("x"))

    @invariant()
    def what_generates_is_whole_and_published(self):
        if self.fence.state is WorkerState.SERVING:
            assert self.whole
            assert self.holds == self.fence.version
            assert self.holds in self.committed


def test_admission_never_falls():
    assert serving(3).admit(2).admitted == 3


def test_a_failed_worker_stays_failed_whatever_was_under_way():
    failed = received(1).failed("the process of local rank 0 ended")
    for after in (
        failed.resumed(),
        failed.paused(),
        failed.committed(1),
        failed.cache_not_reset(1, "x"),
        failed.receive_done(),
    ):
        assert after.state is WorkerState.FAILED


def test_requests_wait_outside_from_the_first_byte_to_the_commit():
    joined = serving().join_done().paused()
    assert joined.door is Door.OPEN
    receiving = joined.receive_begins(1)
    assert receiving.door is Door.HELD
    assert receiving.receive_done().door is Door.HELD
    assert commit(receiving.receive_done(), 1).door is Door.OPEN
    assert receiving.receive_failed(touched=True, was=joined, message="x").door is Door.CLOSED


AnyOrderOfCalls.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
