"""Going on, or back, after the sync job was away, or when nobody knows whether its commit was written.

Only the record decides. A version that stands there as committed is finished on every member that received it; an intent that is still
there may never have been verified, so it is given up and its members are told to abort as they report. Both are the ordinary work of
:mod:`~rolloutfleet_sync.protocol.members`.
"""

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_sync.protocol.commands import ReadStatus
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.members import poll_again
from rolloutfleet_sync.protocol.outcome import describe_hold, finish_refit
from rolloutfleet_sync.protocol.record import Record

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
    """Take over the durable record; an intent in it is given up, and its epoch with it."""
    if not draft.state.reading:
        return
    known = draft.state.record
    if known is not None:
        record = record.above(known.epoch, known.version)
    epoch = max(draft.state.epoch, record.epoch)
    group = draft.state.group if epoch == draft.state.epoch else None
    draft.change(record=record, epoch=epoch, group=group, reading=False, read_at=float("inf"))
    if record.intent is not None:
        held = describe_hold(draft.state, record.intent.version, "the sync job ended in the middle of it")
        draft.change(record=record.model_copy(update={"intent": None, "held": held}))
        raised = draft.raise_epoch()
        if record.intent.repair and draft.state.record is not None:
            draft.change(record=draft.state.record.above(raised, 0))  # what was received before was never verified
    poll_again(draft)
    draft.publish()


def lose_commit(draft: Draft, message: str) -> None:
    """The commit may or may not have been written: end the refit and find out from the status."""
    refit = draft.refit
    if not refit.staged:
        fate = "engines stay fenced"
    else:
        fate = "engines stand still" if refit.pause_started is not None else "engines serve the version before it"
    draft.change(
        write=None,
        reading=True,
        read_at=draft.now,
        group=None,
    )
    draft.change_refit(
        problem=Problem(
            code=ProblemCode.DEADLINE_EXCEEDED,
            message=(
                f"nobody knows whether version {refit.version} is committed: its status could not be written ({message}); "
                f"{fate} until the sync job has read it back, ask for the fleet's version before sending again"
            ),
            phase=refit.phase.value,
        )
    )
    finish_refit(draft, Phase.FAILED)
    read_when_due(draft)
