"""The fence of an engine whose weights or cache are off the device."""

import pytest

from fakes.fences import commit, received, serving, slept, staged
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.worker import SleepLevel, WakeTag, WorkerState
from rolloutfleet_worker.fence import Door, Fence

ALL = frozenset(WakeTag)
WEIGHTS, CACHE = frozenset({WakeTag.WEIGHTS}), frozenset({WakeTag.KV_CACHE})


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
