"""Going on, or back, after the sync job was away, or when nobody knows whether its commit was written.

The record names the members of the refit that was under way. If each of them, in the same process as then, holds the intended version whole
and received the same bytes, the commit is written and they follow; in every other case they are told to abort.
"""

from dataclasses import replace

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Abort, WorkerState
from rolloutfleet_sync.protocol.commands import ReadStatus, WriteCommit
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.members import held_version, poll_again
from rolloutfleet_sync.protocol.model import Recovery, Verb
from rolloutfleet_sync.protocol.outcome import finish_refit
from rolloutfleet_sync.protocol.record import Intent, Record

READ_RETRY_SECONDS = 2.0


def read_when_due(draft: Draft) -> None:
    """Ask for the record while it is unknown."""
    if draft.state.reading and draft.state.read_at <= draft.now:
        draft.change(read_at=float("inf"))
        draft.commands.append(ReadStatus())


def note_unreadable(draft: Draft) -> None:
    """The record could not be read; try again soon."""
    draft.change(read_at=draft.now + READ_RETRY_SECONDS)


def note_status(draft: Draft, record: Record) -> None:
    """Take over the durable record; an intent in it must be settled before anything else happens."""
    if not draft.state.reading:
        return
    known = draft.state.record
    if known is not None:
        record = record.above(known.epoch, known.version)
    epoch = max(draft.state.epoch, record.epoch)
    group = draft.state.group if epoch == draft.state.epoch else None
    draft.change(record=record, epoch=epoch, group=group, reading=False, read_at=float("inf"), recovery=None)
    poll_again(draft)
    if record.intent is not None:
        draft.change(recovery=Recovery(draft.state.next_id, draft.now + draft.state.timing.recovery))
    draft.publish()


def lose_commit(draft: Draft, message: str) -> None:
    """The commit may or may not have been written: end the refit and find out from the status."""
    refit = draft.refit
    draft.change(
        write=None,
        reading=True,
        read_at=draft.now,
        group=None,
        recovery=Recovery(draft.state.next_id, draft.now + draft.state.timing.recovery),
    )
    draft.change_refit(
        problem=Problem(
            code=ProblemCode.DEADLINE_EXCEEDED,
            message=(
                f"nobody knows whether version {refit.version} is committed: its status could not be written ({message}); "
                "engines stay fenced until the sync job has read it back, ask for the fleet's version before sending again"
            ),
            phase=refit.phase.value,
        )
    )
    finish_refit(draft, Phase.FAILED)
    read_when_due(draft)


def progress_recovery(draft: Draft) -> None:
    """Settle the intent as soon as its members' reports allow."""
    state = draft.state
    recovery, record = state.recovery, state.record
    if recovery is None or state.reading or recovery.write is not None or record is None or record.intent is None:
        return
    intent = record.intent
    verdict = _judge(draft, intent, recovery)
    if verdict is None:
        return
    if verdict:
        _abort(draft, intent, verdict)
        return
    write = draft.new_id()
    draft.change(recovery=replace(recovery, write=write))
    committed = Record(epoch=max(intent.epoch, record.epoch), version=intent.version)
    draft.commands.append(WriteCommit(write, committed, float(state.policy.deadlines.committing_seconds)))


def _judge(draft: Draft, intent: Intent, recovery: Recovery) -> str | None:
    """Why the intent must be aborted, empty when it can be committed, None while reports are missing."""
    state = draft.state
    silent = []
    digests = set()
    if state.roster is None:
        silent.append("the roster")
    for member in intent.members if state.roster is not None else ():
        record = state.members.get(member.pod_uid)
        if record is None:
            return f"{member.pod_name} left the fleet"
        report = record.report
        if report is None or record.reported_by < recovery.first_call:
            silent.append(member.pod_name)
            continue
        if report.instance != member.instance:
            return f"the container of {member.pod_name} restarted"
        if report.state is not WorkerState.RECEIVED or held_version(report) != intent.version:
            return f"{member.pod_name} is {report.state.value} and does not hold version {intent.version} whole"
        digests.add(report.received_digest)
    if silent:
        late = draft.now >= recovery.deadline
        return f"no answer from {', '.join(sorted(silent)[:8])}" if late else None
    if len(digests) > 1:
        return f"members received different bytes for version {intent.version}"
    return ""


def finish_recovery_commit(draft: Draft, write: int) -> bool:
    """Whether this write was the recovery's; its members are then brought to the version one by one."""
    recovery, record = draft.state.recovery, draft.state.record
    if recovery is None or recovery.write != write or record is None or record.intent is None:
        return False
    draft.change(
        record=Record(epoch=max(record.epoch, draft.state.epoch), version=record.intent.version), recovery=None
    )
    poll_again(draft)
    draft.publish()
    return True


def fail_recovery_commit(draft: Draft, write: int) -> bool:
    """Whether this write was the recovery's; the status is then read again."""
    recovery = draft.state.recovery
    if recovery is None or recovery.write != write:
        return False
    draft.change(recovery=replace(recovery, write=None), reading=True, read_at=draft.now + READ_RETRY_SECONDS)
    return True


def _abort(draft: Draft, intent: Intent, reason: str) -> None:
    draft.raise_epoch()
    record = draft.state.record
    if record is not None:
        draft.change(record=record.model_copy(update={"intent": None}), recovery=None)
    for member in intent.members:
        known = draft.state.members.get(member.pod_uid)
        if known is None or not known.member.address:
            continue
        if known.call is not None:
            draft.cancel_calls({known.call})
        message = Abort(
            **draft.header(member.pod_uid), reason=f"recovery of the refit of version {intent.version}: {reason}"
        )
        number = draft.call(known, Verb.ABORT, message, draft.state.timing.call)
        draft.change_member(member.pod_uid, call=number, abort_owed=True)
    draft.publish()
