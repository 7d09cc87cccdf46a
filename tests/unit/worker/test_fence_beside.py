"""The fence of an engine that serves meanwhile: versions staged beside its weights, and weights lent to a peer."""

import pytest

from fakes.fences import call, commit, serving, slept, staged
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import SleepLevel, WorkerState
from rolloutfleet_worker.fence import Door


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
