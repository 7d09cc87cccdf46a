"""Calls in any order never make the fence let anything but one committed version generate."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fakes.fences import IDENTITY
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.worker import SleepLevel, WakeTag, WorkerState
from rolloutfleet_worker.fence import Door, Fence


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


AnyOrderOfCalls.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
