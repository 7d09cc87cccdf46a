"""A refit's way from the intent to its end, in the group that :mod:`~rolloutfleet_sync.protocol.forming` has made ready.

In place: write the ``intent`` -> ``pause`` -> ``receive`` -> ``verify`` -> write the ``record`` (the point of no return) -> ``commit`` ->
``resume``. Staged: ``intent`` -> ``receive`` -> ``verify``, all while the engines serve, then ``record`` -> ``commit`` as a swap between
two steps of the model, or ``pause`` -> ``record`` -> ``commit`` -> ``resume`` where requests in flight must not see both versions: a
pause that fails ends the refit while everybody can still go back. Each fan-out goes to all members at once and each step ends when nobody
is waited for any more.
"""

from rolloutfleet.contract.policy import PauseMode, Verify
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Commit, Pause, Receive, ReceiveReport, Resume
from rolloutfleet_sync.protocol.commands import WriteCommit, WriteIntent
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.fanout import call_seat, fan_out, remaining_seconds, seat_header, surviving_seats
from rolloutfleet_sync.protocol.ledger import TRAINER
from rolloutfleet_sync.protocol.model import Seat, Step, Verb
from rolloutfleet_sync.protocol.outcome import abort_refit, enter_phase, finish_committed, lose_seats
from rolloutfleet_sync.protocol.record import Intent, Record
from rolloutfleet_sync.protocol.rolling import announce
from rolloutfleet_sync.protocol.verification import combine_live_digests, find_unverified


def write_intent(draft: Draft) -> None:
    """Write down that engines are about to receive: before the first of them pauses or takes a byte."""
    refit = draft.refit
    held = draft.state.record.held if draft.state.record is not None else ""
    intent = Intent(epoch=refit.epoch, version=refit.version, attempt=refit.attempt, repair=refit.repair)
    record = Record(epoch=refit.epoch, version=draft.state.version, intent=intent, held=held)
    write = draft.new_id()
    draft.change(write=write, record=record)
    draft.change_refit(step=Step.INTENT, waiting=frozenset(), trainer_pending=False)
    draft.commands.append(WriteIntent(write, record, remaining_seconds(draft)))


def note_intent(draft: Draft) -> None:
    """The intent is durable: pause every engine, or receive beside what it serves."""
    announce(draft)
    if draft.refit.staged:
        _begin_receiving(draft)
    else:
        _begin_pausing(draft)


def _begin_pausing(draft: Draft) -> None:
    seconds = draft.state.policy.deadlines.pausing_seconds
    enter_phase(draft, Phase.PAUSING, Step.PAUSE, seconds)
    if draft.refit.pause_started is None:  # engines that were paused for an attempt before have not served since
        draft.change_refit(pause_started=draft.now)
    mode = draft.state.policy.pause
    fan_out(
        draft,
        Verb.PAUSE,
        lambda seat: Pause(**seat_header(draft, seat), mode=mode, deadline_seconds=float(seconds)),
    )


def note_paused(draft: Draft, pod_uid: str) -> None:
    """One member stands still; after the last one come the bytes, or the decision on those that are staged and verified."""
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    if draft.refit.waiting:
        return
    if draft.refit.staged:
        _decide(draft)
    else:
        _begin_receiving(draft)


def _begin_receiving(draft: Draft) -> None:
    deadlines = draft.state.policy.deadlines
    seconds = deadlines.transferring_seconds
    # The durable write and the commit calls have the committing deadline each; a staged version waits for the pause before them too.
    hold = deadlines.verifying_seconds + 2 * deadlines.committing_seconds + deadlines.resuming_seconds
    enter_phase(draft, Phase.TRANSFERRING, Step.RECEIVE, seconds)
    refit = draft.refit
    if refit.staged:
        hold += deadlines.pausing_seconds
    draft.change_refit(trainer_pending=True)
    fan_out(
        draft,
        Verb.RECEIVE,
        lambda seat: Receive(
            **seat_header(draft, seat),
            version=refit.version,
            manifest_digest=refit.manifest_digest,
            staged=refit.staged,
            verify=Verify.BYTES if refit.staged else draft.state.policy.verify,
            deadline_seconds=float(seconds),
            hold_seconds=float(hold),
        ),
    )


def note_receive(draft: Draft, pod_uid: str, report: ReceiveReport) -> None:
    """One member holds the version whole; the last one starts the comparison."""
    refit = draft.refit
    draft.change_refit(
        waiting=refit.waiting - {pod_uid},
        received={**refit.received, pod_uid: report},
        received_before={**refit.received_before, pod_uid: draft.state.next_id},
        arrived={**refit.arrived, pod_uid: draft.now},
        slowest=f"{refit.seat(pod_uid).pod_name} rank {report.slowest_rank}",
    )
    if draft.refit.waiting:
        return
    pending = draft.refit.trainer_pending
    enter_phase(draft, Phase.VERIFYING, Step.VERIFY, draft.state.policy.deadlines.verifying_seconds)
    draft.change_refit(trainer_pending=pending)
    verify(draft)


def verify(draft: Draft) -> None:
    """Compare digests once every worker and the trainer have given theirs; equal ones are committed, after a pause where one is due."""
    refit = draft.refit
    if refit.step is not Step.VERIFY or refit.sent is None:
        return
    faults = find_unverified(refit, refit.sent)
    if TRAINER in faults or faults.keys() >= {seat.pod_uid for seat in refit.seats}:
        problem = faults.get(TRAINER) or next(iter(faults.values()))
        message = f"{problem.message}; the version is not published, send it again"
        abort_refit(draft, problem.code, message, problem.member)
        return
    if faults:
        lose_seats(draft, {uid: (problem.code, problem.message) for uid, problem in faults.items()})
        return
    first = refit.received[refit.seats[0].pod_uid]
    draft.change_refit(live_digest=combine_live_digests(first.live_digests or first.received_digests))
    if refit.staged and refit.adapter is None and draft.state.policy.pause is not PauseMode.KEEP:
        _begin_pausing(draft)
    else:
        _decide(draft)


def _decide(draft: Draft) -> None:
    """Write the version down as committed: the point of no return."""
    enter_phase(draft, Phase.COMMITTING, Step.RECORD, draft.state.policy.deadlines.committing_seconds)
    refit, write = draft.refit, draft.new_id()
    draft.change(write=write)
    draft.change_refit(decided=True)
    draft.commands.append(
        WriteCommit(write, Record(epoch=refit.epoch, version=refit.version), remaining_seconds(draft))
    )


def note_record(draft: Draft) -> None:
    """The version is durable: have every engine that is left publish it."""
    refit = draft.refit
    draft.change(record=Record(epoch=max(refit.epoch, draft.state.epoch), version=refit.version))
    draft.change_refit(committed=True)
    # However long the write took, engines get the whole of this deadline: they are paused until they are told.
    enter_phase(draft, Phase.COMMITTING, Step.COMMIT, draft.state.policy.deadlines.committing_seconds)
    fan_out(draft, Verb.COMMIT, lambda seat: _commit_message(draft, seat), surviving_seats(draft))
    finish_commit_step(draft)


def _commit_message(draft: Draft, seat: Seat) -> Commit:
    return Commit(**seat_header(draft, seat), version=draft.refit.version, cache=draft.state.policy.cache)


def finish_commit_step(draft: Draft) -> None:
    """Resume the engines that published the version and stand still, once no answer is missing."""
    refit = draft.refit
    if refit.waiting:
        return
    paused = tuple(seat for seat in surviving_seats(draft) if seat.pod_uid in refit.left_paused)
    if not paused:
        finish_committed(draft)
        return
    enter_phase(draft, Phase.RESUMING, Step.RESUME, draft.state.policy.deadlines.resuming_seconds)
    fan_out(draft, Verb.RESUME, lambda seat: Resume(**seat_header(draft, seat)), paused)


def finish_resume_step(draft: Draft) -> None:
    """End the refit once every survivor generates again."""
    if not draft.refit.waiting:
        finish_committed(draft)


def call_again(draft: Draft, pod_uid: str) -> None:
    """Repeat an idempotent call of a step after the decision that got no answer."""
    refit = draft.refit
    seat = refit.seat(pod_uid)
    draft.change_refit(retry_at={uid: at for uid, at in refit.retry_at.items() if uid != pod_uid})
    if refit.step is Step.COMMIT:
        call_seat(draft, seat, Verb.COMMIT, _commit_message(draft, seat))
    else:
        call_seat(draft, seat, Verb.RESUME, Resume(**seat_header(draft, seat)))
