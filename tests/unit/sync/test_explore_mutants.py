"""The exploration can fail: each of these faults in the protocol is found, by the promise that it breaks."""

from collections.abc import Callable

import pytest

from fakes.explored.explorer import BrokenPromiseError
from fakes.explored.scenarios import Scenario, settled
from fakes.explored.world import IN_PLACE, STAGED
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol import forming, losses, machine, members, recovery, refit
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.model import Step, Verb

Patch = Callable[[pytest.MonkeyPatch], None]


def commits_without_comparing_digests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refit, "find_unverified", lambda *_: {})


def pauses_without_writing_the_intent(patch: pytest.MonkeyPatch) -> None:
    def skip(draft: Draft) -> None:
        draft.change_refit(step=Step.INTENT, waiting=frozenset(), trainer_pending=False)
        refit.note_intent(draft)

    patch.setattr(forming, "write_intent", skip)


def resumes_a_dirty_engine(patch: pytest.MonkeyPatch) -> None:
    reconcile = members.reconcile_member

    def resume(draft: Draft, pod_uid: str) -> None:
        reconcile(draft, pod_uid)
        record = draft.state.members[pod_uid]
        if record.call is None and record.report is not None and record.report.state is WorkerState.DIRTY:
            members._background(draft, record, record.report, Verb.RESUME)

    patch.setattr(members, "reconcile_member", resume)


def keeps_the_epoch_when_members_change(patch: pytest.MonkeyPatch) -> None:
    def keep(draft: Draft) -> int:
        draft.change(group=None, epoch=max(draft.state.epoch, 1))
        return draft.state.epoch

    patch.setattr(Draft, "raise_epoch", keep)


def lets_phases_last_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(losses, "enforce_deadline", lambda _: None)


def takes_a_failed_commit_for_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "lose_commit", lambda draft, _: refit.note_record(draft))


def tells_engines_before_the_store(patch: pytest.MonkeyPatch) -> None:
    def publish(draft: Draft) -> None:
        draft.change_refit(decided=True)
        refit.note_record(draft)

    patch.setattr(refit, "_decide", publish)


def commits_what_was_only_intended(patch: pytest.MonkeyPatch) -> None:
    note = recovery.note_status

    def trust(draft: Draft, record: object) -> None:
        note(draft, record)  # type: ignore[arg-type]
        intent = getattr(record, "intent", None)
        if intent is not None and draft.state.record is not None:
            draft.change(record=draft.state.record.above(0, intent.version))

    patch.setattr(machine.recovery, "note_status", trust)


@pytest.mark.parametrize(
    ("fault", "promise", "policy"),
    [
        (commits_without_comparing_digests, "a_commit_follows_an_intent_and_a_verification", IN_PLACE),
        (pauses_without_writing_the_intent, "nothing_is_received_before_the_intent_is_stored", IN_PLACE),
        (resumes_a_dirty_engine, "no_dirty_engine_is_resumed", IN_PLACE),
        (keeps_the_epoch_when_members_change, "a_new_refit_completes", IN_PLACE),
        (lets_phases_last_for_ever, "every_phase_ends", STAGED),
        (takes_a_failed_commit_for_written, "a_version_counts_once_it_is_stored", STAGED),
        (tells_engines_before_the_store, "a_version_counts_once_it_is_stored", IN_PLACE),
        (commits_what_was_only_intended, "a_version_counts_once_it_is_stored", IN_PLACE),
    ],
)
def test_a_fault_in_the_protocol_is_found(fault: Patch, promise: str, policy, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with pytest.raises(BrokenPromiseError) as broken:
        Scenario(fault.__name__, 1, policy, 1, settled).explore(depth=400, states=6000)
    assert broken.value.promise == promise
