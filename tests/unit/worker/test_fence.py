"""The worker's fence: which calls it accepts, and what it says and lets through on the way of a refit into the live weights."""

import pytest

from fakes.fences import IDENTITY, call, commit, received, serving
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Admit, WorkerState
from rolloutfleet_worker.fence import Door, Fence


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


def test_a_join_that_comes_twice_leaves_the_worker_in_its_group():
    joined = serving().join_begins().join_done()
    with pytest.raises(ProblemError, match="in the group of epoch 0 already"):
        joined.join_begins()
    assert joined.accept(call(epoch=1)).join_begins().joined is False


def test_a_version_that_is_held_is_not_received_again():
    committed = commit(received(1), 1)
    with pytest.raises(ProblemError, match="receive version 1: this worker holds it already"):
        committed.receive_begins(1)
    with pytest.raises(ProblemError, match="borrow version 1: this worker holds it already"):
        committed.borrow_begins(1)
    assert committed.receive_begins(2).state is WorkerState.RECEIVING


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_a_borrow_that_the_network_kept_back_is_refused_once_the_fleet_has_gone_on(staged: bool):
    engine = serving().admit(2) if staged else serving().admit(2).paused()
    with pytest.raises(ProblemError, match="borrow version 1: the fleet has committed version 2"):
        engine.borrow_begins(1, staged=staged)
    assert engine.borrow_begins(2, staged=staged).version_in_flight == 2


def test_a_held_engine_is_whole_and_refuses_until_a_commit_or_another_word() -> None:
    serving = Fence(identity=IDENTITY).started().admit(3).hold("the refit of version 4 failed")
    assert serving.whole
    assert serving.door is Door.CLOSED
    assert serving.unready_reason() == "Held: the refit of version 4 failed"
    assert serving.admit(0).held == ""
