"""A refit's way forward, from the ledger to the commit.

``gather`` every member's report -> ``check`` the manifest -> ``join`` the group -> write the ``intent`` -> ``pause`` -> ``receive`` ->
``verify`` -> write the ``record`` (the point of no return) -> ``commit`` -> ``resume``. Each fan-out goes to all members at once and each
step ends when nobody is waited for any more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import (
    Call,
    Check,
    CheckReport,
    Commit,
    Join,
    JoinReport,
    Pause,
    Receive,
    ReceiveReport,
    Resume,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_sync.protocol.commands import WriteCommit, WriteIntent
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.ledger import (
    combine_live_digests,
    describe_faults,
    find_ledger_mismatch,
    find_unverified,
    plan_seats,
    world_size,
)
from rolloutfleet_sync.protocol.members import poll_again
from rolloutfleet_sync.protocol.model import Group, MemberRecord, Refit, Seat, Step, Verb
from rolloutfleet_sync.protocol.outcome import abort_refit, enter_phase, fail_queued, finish_committed
from rolloutfleet_sync.protocol.record import Intent, Record

GATHERABLE = frozenset({WorkerState.SERVING, WorkerState.PAUSED, WorkerState.DIRTY})


def start_queued_refit(draft: Draft) -> None:
    """Begin the refit that waits, once nothing else is under way."""
    state = draft.state
    queued = state.queued
    if queued is None or state.active is not None or state.reading:
        return
    if state.session is None or state.session.id != queued.session:
        fail_queued(draft, queued, ProblemCode.SESSION_LOST, f"the session of trainer {queued.trainer} has ended")
        return
    if queued.version <= state.version:
        fail_queued(draft, queued, ProblemCode.STALE_VERSION, stale_version_message(queued.version, state.version))
        return
    draft.change(refit=replace(queued, started=draft.now, first_call=state.next_id), queued=None)
    enter_phase(draft, Phase.FORMING, Step.GATHER, state.policy.deadlines.forming_seconds)
    _gather_from(draft)


def stale_version_message(asked: int, committed: int) -> str:
    """Why a version is refused."""
    return f"version {asked} is not above the committed version {committed}; send {committed + 1} or higher"


def _gather_from(draft: Draft) -> None:
    poll_again(draft)
    draft.change_refit(waiting=frozenset(draft.state.members))


def is_gathered(draft: Draft, record: MemberRecord) -> bool:
    """Whether the member has reported since the refit began and can take part."""
    report = record.report
    return (
        record.failure is None
        and not record.abort_owed
        and not _is_being_reconciled(draft, record)
        and report is not None
        and record.reported_by >= draft.refit.first_call
        and report.state in GATHERABLE
    )


def _is_being_reconciled(draft: Draft, record: MemberRecord) -> bool:
    """Whether a call is under way that could reach the member after the refit's first ones."""
    call = draft.state.calls.get(record.call) if record.call is not None else None
    return call is not None and call.verb is not Verb.REPORT


def gather_member(draft: Draft, pod_uid: str) -> None:
    """Take one member's report into the ledger, and close it when it is full."""
    record = draft.state.members.get(pod_uid)
    refit = draft.refit
    if record is None or pod_uid not in refit.waiting or not is_gathered(draft, record):
        return
    draft.change_refit(waiting=refit.waiting - {pod_uid})
    close_ledger_when_full(draft)


def restart_gathering(draft: Draft) -> None:
    """The roster changed while the ledger was open: wait for the members of the new one."""
    draft.change_refit(
        waiting=frozenset(uid for uid, record in draft.state.members.items() if not is_gathered(draft, record))
    )
    close_ledger_when_full(draft)


def close_ledger_when_full(draft: Draft) -> None:
    """Open the barrier if every engine of the fleet is in the ledger and all lines fit together."""
    state, refit, roster = draft.state, draft.refit, draft.state.roster
    if refit.waiting or roster is None or not roster.members or len(roster.members) < roster.engines:
        return
    unready = frozenset(uid for uid, record in state.members.items() if not is_gathered(draft, record))
    if unready:
        draft.change_refit(waiting=unready)
        return
    session = state.session
    if session is None:
        raise AssertionError("a refit without a session is aborted before its ledger closes")
    reports = {uid: record.report for uid, record in state.members.items() if record.report is not None}
    seats = plan_seats(roster.members, {uid: report.instance for uid, report in reports.items()})
    draft.change_refit(seats=seats)
    problem = find_ledger_mismatch(seats, reports, session.request, state.policy.transport)
    if problem is not None:
        abort_refit(draft, problem.code, problem.message, problem.member)
        return
    group = state.group
    if group is not None and (group.session != session.id or group.seats != seats):
        group = None
    draft.change(group=group)
    if group is not None and refit.manifest_digest in group.checked:
        _form_group(draft)
        return
    draft.change_refit(step=Step.CHECK)
    _fan_out(
        draft,
        Verb.CHECK,
        lambda seat: Check(
            **_header(draft, seat, state.epoch), manifest=_manifest(refit), deadline_seconds=_remaining(draft)
        ),
    )


def _manifest(refit: Refit) -> Manifest:
    if refit.manifest is None:
        raise AssertionError(f"refit {refit.id} has ended")
    return refit.manifest


def _remaining(draft: Draft) -> float:
    return max(draft.refit.deadline - draft.now, 0.001)


def _fan_out(draft: Draft, verb: Verb, message: Callable[[Seat], Call], seats: tuple[Seat, ...] | None = None) -> None:
    chosen = draft.refit.seats if seats is None else seats
    draft.change_refit(waiting=frozenset(seat.pod_uid for seat in chosen))
    for seat in chosen:
        _call_seat(draft, seat, verb, message(seat))


def _header(draft: Draft, seat: Seat, epoch: int) -> dict[str, Any]:
    return draft.header(seat.pod_uid, seat.instance, epoch)


def _call_seat(draft: Draft, seat: Seat, verb: Verb, message: Call) -> None:
    record = draft.state.members.get(seat.pod_uid)
    if record is not None:
        draft.call(record, verb, message, _remaining(draft) + 0.5, refit=draft.refit.id)


def note_check(draft: Draft, pod_uid: str, report: CheckReport) -> None:
    """One member has looked at the manifest; faults are collected from all before the refit fails."""
    refit = draft.refit
    faults = {**refit.faults, pod_uid: report.faults} if report.faults else refit.faults
    draft.change_refit(waiting=refit.waiting - {pod_uid}, faults=faults)
    if draft.refit.waiting:
        return
    if faults:
        problem = describe_faults(refit.version, faults, refit.seats)
        abort_refit(draft, problem.code, problem.message, problem.member)
        return
    _form_group(draft)


def _form_group(draft: Draft) -> None:
    state, refit = draft.state, draft.refit
    if state.group is not None:
        group = replace(state.group, checked=state.group.checked | {refit.manifest_digest})
        draft.change(group=group)
        draft.change_refit(epoch=group.epoch)
        _write_intent(draft)
        return
    if state.session is None:
        raise AssertionError("a refit without a session is aborted before its group forms")
    rendezvous = state.session.request.rendezvous
    epoch = draft.raise_epoch()
    draft.change_refit(epoch=epoch, step=Step.JOIN, trainer_pending=True)
    size = world_size(refit.seats)
    seconds = _remaining(draft)
    _fan_out(
        draft,
        Verb.JOIN,
        lambda seat: Join(
            **_header(draft, seat, epoch),
            transport=state.policy.transport,
            rendezvous=rendezvous,
            rank_offset=seat.offset,
            world_size=size,
            deadline_seconds=seconds,
        ),
    )


def note_join(draft: Draft, pod_uid: str, report: JoinReport) -> None:
    """One member is in the group, as the ranks that were planned for it or not at all."""
    seat = draft.refit.seat(pod_uid)
    expected = tuple(range(seat.offset, seat.offset + seat.ranks))
    if report.ranks != expected:
        abort_refit(
            draft,
            ProblemCode.ENGINE_FAILED,
            f"{seat.pod_name} joined as ranks {list(report.ranks)}, the plan says {list(expected)}",
            seat.pod_name,
        )
        return
    draft.change_member(pod_uid, abort_owed=False)
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    finish_joining(draft)


def finish_joining(draft: Draft) -> None:
    """Keep the group once every worker and the trainer are in it, and go on to the intent."""
    state, refit = draft.state, draft.refit
    if refit.waiting or refit.trainer_pending:
        return
    draft.change(group=Group(refit.session, refit.epoch, refit.seats, frozenset({refit.manifest_digest})))
    if state.epoch != refit.epoch:
        abort_refit(
            draft,
            ProblemCode.STALE_EPOCH,
            f"the group formed in epoch {refit.epoch}, but a worker has seen epoch {state.epoch}",
        )
        return
    _write_intent(draft)


def _write_intent(draft: Draft) -> None:
    refit = draft.refit
    intent = Intent(epoch=refit.epoch, version=refit.version)
    record = Record(epoch=refit.epoch, version=draft.state.version, intent=intent)
    write = draft.new_id()
    draft.change(write=write, record=record)
    draft.change_refit(step=Step.INTENT, waiting=frozenset(), trainer_pending=False)
    draft.commands.append(WriteIntent(write, record, _remaining(draft)))


def begin_pausing(draft: Draft) -> None:
    """The intent is durable: pause every engine."""
    seconds = draft.state.policy.deadlines.pausing_seconds
    enter_phase(draft, Phase.PAUSING, Step.PAUSE, seconds)
    draft.change_refit(pause_started=draft.now)
    epoch, mode = draft.refit.epoch, draft.state.policy.pause
    _fan_out(
        draft,
        Verb.PAUSE,
        lambda seat: Pause(**_header(draft, seat, epoch), mode=mode, deadline_seconds=float(seconds)),
    )


def note_pause(draft: Draft, pod_uid: str, report: WorkerReport) -> None:
    """One member has paused; the last one starts the transfer."""
    seat = draft.refit.seat(pod_uid)
    if report.state not in {WorkerState.PAUSED, WorkerState.DIRTY}:
        abort_refit(
            draft,
            ProblemCode.WRONG_STATE,
            f"{seat.pod_name} is {report.state.value} after it was asked to pause",
            seat.pod_name,
        )
        return
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    if draft.refit.waiting:
        return
    deadlines = draft.state.policy.deadlines
    seconds = deadlines.transferring_seconds
    # The durable write and the commit calls have the committing deadline each.
    hold = deadlines.verifying_seconds + 2 * deadlines.committing_seconds + deadlines.resuming_seconds
    enter_phase(draft, Phase.TRANSFERRING, Step.RECEIVE, seconds)
    refit = draft.refit
    draft.change_refit(trainer_pending=True)
    _fan_out(
        draft,
        Verb.RECEIVE,
        lambda seat: Receive(
            **_header(draft, seat, refit.epoch),
            version=refit.version,
            manifest=_manifest(refit),
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
    )
    if draft.refit.waiting:
        return
    pending = draft.refit.trainer_pending
    enter_phase(draft, Phase.VERIFYING, Step.VERIFY, draft.state.policy.deadlines.verifying_seconds)
    draft.change_refit(trainer_pending=pending)
    verify(draft)


def verify(draft: Draft) -> None:
    """Compare digests once every worker and the trainer have given theirs; equal ones decide the commit."""
    refit = draft.refit
    if refit.step is not Step.VERIFY or refit.sent is None:
        return
    problem = find_unverified(refit.version, _manifest(refit), refit.sent, refit.seats, refit.received)
    if problem is not None:
        abort_refit(draft, problem.code, problem.message, problem.member)
        return
    live = combine_live_digests(refit.received[refit.seats[0].pod_uid].live_digests)
    enter_phase(draft, Phase.COMMITTING, Step.RECORD, draft.state.policy.deadlines.committing_seconds)
    write = draft.new_id()
    record = Record(epoch=refit.epoch, version=refit.version)
    draft.change(write=write)
    draft.change_refit(live_digest=live, decided=True)
    draft.commands.append(WriteCommit(write, record, _remaining(draft)))


def begin_committing(draft: Draft) -> None:
    """The version is durable: publish it on every engine that is still there."""
    refit = draft.refit
    draft.change(record=Record(epoch=max(refit.epoch, draft.state.epoch), version=refit.version))
    # However long the write took, engines get the whole of this deadline: they are paused until they are told.
    enter_phase(draft, Phase.COMMITTING, Step.COMMIT, draft.state.policy.deadlines.committing_seconds)
    draft.change_refit(committed=True)
    survivors = tuple(seat for seat in refit.seats if seat.pod_uid not in refit.casualties)
    cache = draft.state.policy.cache
    _fan_out(
        draft,
        Verb.COMMIT,
        lambda seat: Commit(**_header(draft, seat, refit.epoch), version=refit.version, cache=cache),
        survivors,
    )
    finish_commit_step(draft)


def finish_commit_step(draft: Draft) -> None:
    """Resume the engines that published the version, once no answer is missing."""
    refit = draft.refit
    if refit.waiting:
        return
    survivors = tuple(seat for seat in refit.seats if seat.pod_uid not in refit.casualties)
    enter_phase(draft, Phase.RESUMING, Step.RESUME, draft.state.policy.deadlines.resuming_seconds)
    _fan_out(draft, Verb.RESUME, lambda seat: Resume(**_header(draft, seat, refit.epoch)), survivors)
    finish_resume_step(draft)


def finish_resume_step(draft: Draft) -> None:
    """End the refit once every survivor generates again."""
    if not draft.refit.waiting:
        finish_committed(draft)


def call_again(draft: Draft, pod_uid: str) -> None:
    """Repeat an idempotent call of the commit or resume step that got no answer."""
    refit = draft.refit
    seat = refit.seat(pod_uid)
    draft.change_refit(retry_at={uid: at for uid, at in refit.retry_at.items() if uid != pod_uid})
    header = _header(draft, seat, refit.epoch)
    if refit.step is Step.COMMIT:
        message: Call = Commit(**header, version=refit.version, cache=draft.state.policy.cache)
        _call_seat(draft, seat, Verb.COMMIT, message)
    else:
        _call_seat(draft, seat, Verb.RESUME, Resume(**header))
