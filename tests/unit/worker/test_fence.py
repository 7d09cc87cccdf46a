"""The worker's fence: which calls it accepts, and that it never lets anything but one committed version generate."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Admit, SleepLevel, WakeTag, WorkerState
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
    with pytest.raises(ProblemError, match="receive needs the state to be one of Asleep, Dirty, Paused, it is Serving"):
        serving().join_done().receive_begins(1)
    with pytest.raises(ProblemError, match="has not joined a group in epoch 0"):
        serving().paused().receive_begins(1)


@pytest.mark.scenario("F52")
def test_a_cache_that_was_not_reset_fences_the_worker():
    fenced = received(2).commit_begins(2).cache_not_reset(2, "vLLM answered no")
    assert "the prefix cache could not be reset for version 2: vLLM answered no" in fenced.unready_reason()
    with pytest.raises(ProblemError, match="cannot commit version 2"):
        fenced.commit_begins(2)


ALL = frozenset(WakeTag)
WEIGHTS, CACHE = frozenset({WakeTag.WEIGHTS}), frozenset({WakeTag.KV_CACHE})


def staged(version: int, holds: int = 0) -> Fence:
    return serving(holds).join_done().receive_begins(version, staged=True).receive_done()


def slept(level: SleepLevel, fence: Fence | None = None) -> Fence:
    return (fence or serving(3)).sleep_begins(level).slept(level)


def test_a_staged_version_arrives_behind_an_open_door_while_the_old_one_serves():
    arriving = serving(3).join_done().receive_begins(4, staged=True)
    for fence in (arriving, arriving.receive_done()):
        assert (fence.state, fence.version, fence.version_in_flight) == (WorkerState.SERVING, 3, 4)
        assert fence.staged
        assert fence.holds(3)
        assert fence.door is Door.OPEN


@pytest.mark.parametrize("touched", [False, True])
def test_a_staged_transfer_that_fails_forgets_the_staged_bytes_alone(touched: bool):
    was = serving(3).join_done()
    left = was.receive_begins(4, staged=True).receive_failed(touched=touched, was=was, message="peer lost")
    assert (left.state, left.version, left.version_in_flight, left.staged) == (WorkerState.SERVING, 3, 0, False)
    assert left.unready_reason() == ""
    assert not left.joined


def test_an_abort_forgets_a_staged_version_and_goes_on_serving():
    aborted = staged(4, holds=3).aborted("the trainer is gone")
    assert (aborted.state, aborted.version, aborted.version_in_flight) == (WorkerState.SERVING, 3, 0)
    with pytest.raises(ProblemError, match="cannot commit version 4: this worker holds version 3 in state Serving"):
        aborted.commit_begins(4)


def test_a_staged_version_is_committed_by_a_swap_that_leaves_the_engine_serving_it():
    fence = staged(4, holds=3).admit(3)
    assert fence.swaps_for(4)
    swapping = fence.commit_begins(4).swap_begins()
    assert swapping.door is Door.HELD
    done = swapping.swap_done().committed(4, serving=True)
    assert (done.state, done.version, done.version_in_flight, done.door) == (WorkerState.SERVING, 4, 0, Door.OPEN)
    assert done.commit_begins(4).committed(4) == done


def test_a_swap_in_a_paused_engine_leaves_it_paused():
    done = staged(4).paused().commit_begins(4).swap_begins().swap_done().committed(4)
    assert done.state is WorkerState.PAUSED


def test_a_swap_that_fails_half_way_is_dirty():
    dirty = staged(4, holds=3).commit_begins(4).swap_begins().swap_failed("rank 1: illegal address")
    assert dirty.unready_reason() == "Dirty: the swap to version 4 ended half way: rank 1: illegal address"
    assert dirty.door is Door.CLOSED


def test_a_version_that_still_arrives_cannot_be_committed():
    arriving = serving(3).join_done().receive_begins(4, staged=True)
    with pytest.raises(ProblemError, match="still arriving beside the live weights"):
        arriving.commit_begins(4)


def test_nothing_replaces_a_staged_version_before_it_is_committed_or_aborted():
    fence = staged(4).paused()
    for act in (
        lambda: fence.receive_begins(5),
        lambda: fence.receive_begins(5, staged=True),
        lambda: fence.prepare_begins(staged=True),
        lambda: fence.borrow_begins(5),
    ):
        with pytest.raises(
            ProblemError, match="version 4 lies staged beside the live weights; commit or abort it first"
        ):
            act()
    assert not fence.accept(call(epoch=1)).join_begins().staged


def test_a_dirty_engine_has_nothing_to_serve_beside_a_staged_version():
    was = serving().join_done().paused()
    dirty = was.receive_begins(1).receive_failed(touched=True, was=was, message="x").join_done()
    with pytest.raises(ProblemError, match="receive beside the live weights needs the state to be one of") as refused:
        dirty.receive_begins(2, staged=True)
    assert refused.value.code is ProblemCode.DIRTY


def test_preparing_needs_a_group_and_changes_nothing():
    with pytest.raises(ProblemError, match="has not joined a group in epoch 0"):
        serving().prepare_begins(staged=False)
    assert serving().join_done().prepare_begins(staged=True) == serving().join_done()


@pytest.mark.row("A-U5")
def test_level_one_sleep_comes_back_with_the_version_it_went_with():
    asleep = slept(SleepLevel.OFFLOAD)
    assert (asleep.state, asleep.sleep_level, asleep.door) == (WorkerState.ASLEEP, 1, Door.CLOSED)
    assert asleep.unready_reason() == "Asleep: level 1, kv_cache and weights off the device; wake it"
    half = asleep.wake_begins().woken(WEIGHTS)
    assert (half.state, half.door) == (WorkerState.ASLEEP, Door.CLOSED)
    awake = half.wake_begins().woken(CACHE)
    assert (awake.state, awake.version, awake.sleep_level, awake.door) == (WorkerState.SERVING, 3, 0, Door.OPEN)


def test_sleeping_and_waking_again_change_nothing():
    asleep = slept(SleepLevel.OFFLOAD)
    assert asleep.sleep_begins(SleepLevel.OFFLOAD) == asleep
    assert serving().wake_begins() == serving()
    with pytest.raises(ProblemError, match="this worker sleeps at level 1 with kv_cache and weights off the device"):
        asleep.sleep_begins(SleepLevel.DISCARD)


@pytest.mark.scenario("F49")
def test_nothing_reads_or_writes_weights_that_are_asleep():
    asleep = slept(SleepLevel.OFFLOAD, serving(3).join_done())
    for act in (
        asleep.check_begins,
        asleep.join_begins,
        lambda: asleep.prepare_begins(staged=False),
        lambda: asleep.receive_begins(4),
    ):
        with pytest.raises(ProblemError, match="the weights are asleep at level 1; wake tag weights first"):
            act()
    with pytest.raises(ProblemError, match="needs the state to be one of"):
        asleep.borrow_begins(4)


@pytest.mark.scenario("F50")
def test_level_two_sleep_is_dirty_until_refitted():
    awake = slept(SleepLevel.DISCARD).wake_begins().woken(ALL)
    assert awake.unready_reason() == "Dirty: slept at level 2: its weights are gone; refit it"
    with pytest.raises(ProblemError, match="resume needs the state"):
        awake.resume_begins()
    assert not awake.holds(3)


@pytest.mark.scenario("F50")
def test_weights_woken_from_level_two_are_refitted_before_the_cache_comes_back():
    half = slept(SleepLevel.DISCARD).woken(WEIGHTS).join_begins().join_done()
    assert not half.holds(3)
    refitted = commit(half.pause_begins().receive_begins(4).receive_done(), 4)
    assert (refitted.state, refitted.door) == (WorkerState.ASLEEP, Door.CLOSED)
    assert refitted.holds(4)
    awake = refitted.resume_begins().wake_begins().woken(CACHE)
    assert (awake.state, awake.version, awake.door) == (WorkerState.SERVING, 4, Door.OPEN)


def test_a_refit_that_fails_between_two_wakes_leaves_the_engine_dirty_when_it_is_awake():
    half = slept(SleepLevel.OFFLOAD).woken(WEIGHTS).join_done()
    dirty = half.receive_begins(4).receive_failed(touched=True, was=half, message="peer lost")
    awake = dirty.wake_begins().woken(CACHE)
    assert awake.unready_reason() == "Dirty: the transfer of version 4 ended half way: peer lost"
    assert awake.asleep == frozenset()


def test_a_dirty_engine_that_slept_wakes_dirty():
    was = serving().join_done().paused()
    dirty = was.receive_begins(1).receive_failed(touched=True, was=was, message="peer lost")
    assert slept(SleepLevel.OFFLOAD, dirty).woken(ALL).state is WorkerState.DIRTY


@pytest.mark.parametrize(
    "fence", [received(4), staged(4), serving().join_done().paused(), serving().lend_begins(0)], ids=lambda f: f.state
)
def test_an_engine_with_a_version_in_flight_does_not_fall_asleep(fence: Fence):
    with pytest.raises(ProblemError, match="sleep"):
        fence.sleep_begins(SleepLevel.OFFLOAD)


def test_a_lender_serves_on_and_changes_no_weight_until_it_has_let_go():
    lending = serving(3).lend_begins(3)
    assert (lending.state, lending.door) == (WorkerState.SERVING, Door.OPEN)
    joined = lending.join_done()
    for act in (
        lambda: joined.paused().receive_begins(4),
        lambda: joined.paused().borrow_begins(4),
        lambda: joined.receive_begins(4, staged=True).receive_done().commit_begins(4),
        lambda: joined.lend_begins(3),
    ):
        with pytest.raises(ProblemError, match="lends its weights to a peer"):
            act()
    assert lending.lend_ended() == serving(3)
    assert not lending.aborted("x").lending


def test_only_the_version_that_is_held_can_be_lent():
    with pytest.raises(ProblemError, match="cannot lend version 4: this worker holds version 3 in state Serving"):
        serving(3).lend_begins(4)
    with pytest.raises(ProblemError, match="cannot lend version 3: this worker holds version 3 in state Asleep"):
        slept(SleepLevel.OFFLOAD).lend_begins(3)


def test_a_borrower_is_fenced_until_the_borrowed_version_is_committed():
    borrowing = serving().admit(3).paused().borrow_begins(3)
    assert borrowing.state is WorkerState.RECEIVING
    committed = commit(borrowing.receive_done(), 3)
    assert (committed.state, committed.unready_reason()) == (WorkerState.PAUSED, "")
    was = serving().paused()
    assert borrowing.receive_failed(touched=True, was=was, message="x").state is WorkerState.DIRTY


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Calls in any order: the fence refuses or goes on, but never generates a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = Fence(identity=IDENTITY)
        self.whole = True
        self.holds = 0
        self.staged = 0
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
        assert was.state in {WorkerState.PAUSED, WorkerState.DIRTY, WorkerState.ASLEEP}
        assert WakeTag.WEIGHTS not in was.asleep
        assert self.fence.door is not Door.OPEN
        if outcome == "done":
            self.whole, self.holds = True, version
            self.attempt(lambda f: f.receive_done())
        else:
            self.whole = self.whole and outcome == "untouched"
            self.attempt(lambda f: f.receive_failed(touched=outcome == "touched", was=was, message="x"))

    @rule(version=st.integers(1, 3), outcome=st.sampled_from(["done", "touched", "untouched"]))
    def stage(self, version, outcome):
        was = self.fence
        if not self.attempt(lambda f: f.receive_begins(version, staged=True)):
            return
        assert self.fence.door is was.door
        if outcome == "done":
            self.staged = version
            self.attempt(lambda f: f.receive_done())
        else:
            self.attempt(lambda f: f.receive_failed(touched=outcome == "touched", was=was, message="x"))

    @rule(version=st.integers(1, 3), outcome=st.sampled_from(["done", "failed"]))
    def swap(self, version, outcome):
        if not self.fence.swaps_for(version) or not self.attempt(lambda f: f.commit_begins(version).swap_begins()):
            return
        if outcome == "failed":
            self.whole = False
            self.attempt(lambda f: f.swap_failed("x"))
            return
        self.whole, self.holds = True, self.staged
        self.committed.add(version)
        self.attempt(lambda f: f.swap_done().committed(version, serving=True))

    @rule(level=st.sampled_from(SleepLevel))
    def sleep(self, level):
        if self.attempt(lambda f: f.sleep_begins(level)) and not self.fence.asleep:
            self.whole = self.whole and level is SleepLevel.OFFLOAD
            self.attempt(lambda f: f.slept(level))

    @rule(tags=st.sets(st.sampled_from(WakeTag), min_size=1))
    def wake(self, tags):
        if self.attempt(lambda f: f.wake_begins()):
            self.attempt(lambda f: f.woken(tags & f.asleep))

    @rule(version=st.integers(0, 3))
    def lend(self, version):
        if self.attempt(lambda f: f.lend_begins(version)):
            assert self.whole
            assert self.holds == version

    @rule()
    def let_go(self):
        self.attempt(lambda f: f.lend_ended())

    @rule(version=st.integers(1, 3), outcome=st.sampled_from(["done", "touched"]))
    def borrow(self, version, outcome):
        was = self.fence
        if not self.attempt(lambda f: f.borrow_begins(version)):
            return
        if outcome == "done":
            self.whole, self.holds = True, version
            self.attempt(lambda f: f.receive_done())
        else:
            self.whole = False
            self.attempt(lambda f: f.receive_failed(touched=True, was=was, message="x"))

    @rule(version=st.integers(1, 3), cache_goes=st.booleans())
    def commit(self, version, cache_goes):
        if self.fence.swaps_for(version):
            return
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
            assert not self.fence.asleep

    @invariant()
    def what_is_lent_is_whole_and_does_not_change(self):
        if self.fence.lending:
            assert self.fence.state not in {WorkerState.RECEIVING, WorkerState.RECEIVED, WorkerState.ASLEEP}


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
