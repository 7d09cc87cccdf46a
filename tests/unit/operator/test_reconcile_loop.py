"""What wakes a loop, how long it sleeps, what it does with errors, and how it ends."""

import asyncio

import pytest

from rolloutfleet_operator.cluster.kinds import ObjectRef
from rolloutfleet_operator.errors import (
    BlockedError,
    ConflictError,
    InvalidSpecError,
    OperatorError,
    OwnershipConflictError,
    TransientError,
)
from rolloutfleet_operator.plan.observed import FleetBrief, WeightSync
from rolloutfleet_operator.reconcile.loop import drive_fleet
from rolloutfleet_operator.reconcile.taxonomy import FAULT, gravest, requeue_after, treatment_of
from rolloutfleet_operator.reconcile.ticks import Ticks
from rolloutfleet_operator.reconcile.wakes import Wakes
from rolloutfleet_operator.reconcile.weightsyncs import drive_weightsync, hand_over, sync_wake_key

KEY = ("rl", "demo")


class Stop:
    def __init__(self):
        self.flag = asyncio.Event()

    def __bool__(self):
        return self.flag.is_set()

    async def wait(self):
        await self.flag.wait()


async def test_flags_wake_every_loop_of_a_key_and_no_other():
    wakes = Wakes()
    one, two, other = wakes.open("a"), wakes.open("a"), wakes.open("b")
    wakes.wake("a")
    assert (one.is_set(), two.is_set(), other.is_set()) == (True, True, False)
    wakes.wake_all()
    assert other.is_set()
    wakes.close("a", one)
    two.clear()
    wakes.wake("a")
    assert two.is_set()


def test_only_a_changed_payload_counts():
    wakes = Wakes()
    assert wakes.changed("uid", (1,))
    assert not wakes.changed("uid", (1,))
    assert wakes.changed("uid", (2,))
    assert wakes.changed("uid", None)
    assert not wakes.changed("uid", None)


def test_a_loop_that_is_not_heard_of_is_named():
    time = [0.0]
    ticks = Ticks(lambda: time[0])
    ticks.beat(("rl", "demo"), 10)
    ticks.beat(("rl", "other"), 30)
    time[0] = 20
    assert ticks.overdue() == ["('rl', 'demo')"]
    ticks.drop(("rl", "demo"))
    assert ticks.overdue() == []


@pytest.mark.parametrize(
    ("error", "failures", "seconds"),
    [
        (InvalidSpecError("x"), 1, None),
        (OwnershipConflictError("x"), 1, 300),
        (BlockedError("x"), 1, 15),
        (ConflictError("x"), 1, 2),
        (TransientError("x"), 1, 1.5),
        (TransientError("x"), 4, 12),
        (TransientError("x"), 50, 225),
        (TransientError("x", retry_after=7), 1, 7.5),
        (RuntimeError("x"), 2, 3),
    ],
)
def test_each_class_of_error_has_its_own_patience(error, failures, seconds):
    assert requeue_after(error, failures, 0.5) == seconds


def test_of_several_errors_the_gravest_decides():
    errors = [TransientError("a"), OwnershipConflictError("b"), BlockedError("c")]
    assert gravest(errors).message == "b"
    assert gravest([*errors, OperatorError("unknown")]).message == "unknown"
    assert treatment_of(RuntimeError()) is FAULT


@pytest.fixture
def drive(runtime, cluster, make_body):
    """A running loop: (its task, the order to stop, an event set after each pass)."""

    def start(observe=None, emit=lambda body, event: None):
        stop, passed = Stop(), asyncio.Event()

        def watched():
            passed.set()
            return (observe or cluster.observe)()

        return asyncio.create_task(drive_fleet(runtime, KEY, watched, emit, stop)), stop, passed

    return start


async def test_a_loop_begins_with_a_pass_and_ends_when_told(drive, cluster, make_body):
    cluster.put(make_body())
    task, stop, passed = drive()
    await asyncio.wait_for(passed.wait(), 5)
    stop.flag.set()
    await asyncio.wait_for(task, 5)


async def test_a_wake_makes_another_pass(drive, cluster, make_body, runtime):
    cluster.put(make_body())
    task, stop, passed = drive()
    await asyncio.wait_for(passed.wait(), 5)
    passed.clear()
    runtime.wakes.wake(KEY)
    await asyncio.wait_for(passed.wait(), 5)
    stop.flag.set()
    await asyncio.wait_for(task, 5)


async def test_a_fault_is_logged_with_its_stack_and_does_not_end_the_loop(drive, cluster, make_body, caplog, runtime):
    cluster.put(make_body())

    def broken():
        raise RuntimeError("boom")

    told = asyncio.Event()
    events = []

    def emit(body, event):
        events.append(event.reason)
        told.set()

    task, stop, _ = drive(broken, emit)
    await asyncio.wait_for(told.wait(), 5)
    stop.flag.set()
    await asyncio.wait_for(task, 5)
    assert events == ["InternalError"]
    assert "boom" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_loop_that_is_stopped_in_the_middle_of_a_pass_ends_at_once(drive, cluster, make_body, runtime):
    cluster.put(make_body())
    reached, never = asyncio.Event(), asyncio.Event()

    async def hang(ref):
        reached.set()
        await never.wait()

    cluster.get = hang
    task, stop, _ = drive()
    await asyncio.wait_for(reached.wait(), 5)
    stop.flag.set()
    await asyncio.wait_for(task, 5)
    assert runtime.ticks.overdue() == []


class TestWeightSyncLoop:
    REF = ObjectRef("WeightSync", "rl", "late")

    @pytest.fixture
    def sync(self, now):
        def make(**status):
            return WeightSync("late", "u", 1, now, False, 0, 0, status)

        return make

    async def test_says_that_its_fleet_is_missing(self, runtime, cluster, sync):
        cluster.put({"kind": "WeightSync", "metadata": {"name": "late", "namespace": "rl"}})
        stop, written = Stop(), asyncio.Event()
        apply = cluster.apply

        async def spy(*args, **kwargs):
            await apply(*args, **kwargs)
            written.set()

        cluster.apply = spy
        task = asyncio.create_task(drive_weightsync(runtime, self.REF, "demo", lambda: (sync(), None), stop))
        await asyncio.wait_for(written.wait(), 5)
        stop.flag.set()
        await asyncio.wait_for(task, 5)
        (condition,) = cluster.objects[self.REF]["status"]["conditions"]
        assert condition["reason"] == "FleetNotFound"

    async def test_is_not_let_go_before_the_fleet_has_its_version(self, runtime, sync):
        brief = [FleetBrief("f", 1, False, 4, 6)]
        waiting = asyncio.create_task(hand_over(runtime, "rl", "demo", lambda: (sync(epoch=4, version=7), brief[0])))
        await asyncio.sleep(0)
        assert not waiting.done()
        brief[0] = FleetBrief("f", 1, False, 4, 7)
        runtime.wakes.wake(sync_wake_key("rl", "demo"))
        await asyncio.wait_for(waiting, 5)

    @pytest.mark.parametrize("brief", [None, FleetBrief("f", 1, True, 0, 0)])
    async def test_is_let_go_when_its_fleet_goes(self, runtime, sync, brief):
        await asyncio.wait_for(hand_over(runtime, "rl", "demo", lambda: (sync(version=7), brief)), 5)
