"""The members of the roster: polling them, and bringing each to where the fleet stands when no refit needs it.

While no refit is past its ledger, a member is compared with the committed version at every report and gets at most one call at a
time: ``abort`` when it is stuck in a group, ``let-go`` when it lends to nobody that is known, ``commit`` when it missed one (after a
``pause`` where a staged version may not be swapped in between two steps), ``admit`` when it has not been told the version, ``resume`` when
it was left paused. One that needs none of these and lacks the version may get it from a peer, see
:mod:`~rolloutfleet_sync.protocol.latejoin`. During a refit nobody is compared: a pod admitted then would serve the old version beside the
new one.
"""

from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel

from rolloutfleet.contract.members import Roster
from rolloutfleet.contract.policy import OnFailure, PauseMode
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import (
    Abort,
    Admit,
    Commit,
    LetGo,
    Pause,
    Resume,
    SleepLevel,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.fanout import GRACE_SECONDS
from rolloutfleet_sync.protocol.model import MemberRecord, PendingCall, Seat, State, Step, Verb
from rolloutfleet_sync.protocol.staleness import is_told, may_take_out, rolls, serves, stale_seconds

WHOLE = frozenset({WorkerState.SERVING, WorkerState.PAUSED})
REASON_LENGTH = 2000
STUCK = frozenset({WorkerState.RECEIVING, WorkerState.RECEIVED})


def is_admitted(record: MemberRecord, version: int) -> bool:
    """Whether the member holds the committed version and has been told so; one that merely offloaded it still does."""
    report = record.report
    return (
        record.failure is None
        and report is not None
        and (report.state in WHOLE or sleeps_lightly(report))
        and report.admitted == version
        and report.version == version
        and report.stale_seconds != 0
    )


def sleeps_lightly(report: WorkerReport) -> bool:
    """Whether the engine sleeps and its weights come back as they were."""
    return report.state is WorkerState.ASLEEP and report.sleep_level == SleepLevel.OFFLOAD


def is_member_busy(state: State, record: MemberRecord) -> bool:
    """Whether a call is under way that changes the member."""
    call = state.calls.get(record.call) if record.call is not None else None
    return call is not None and call.verb is not Verb.REPORT


def change_roster(draft: Draft, roster: Roster) -> None:
    """Take over the operator's roster; records of pods that stay are kept, new pods are polled at once."""
    known = draft.state.members
    members = {}
    for member in roster.members:
        record = known.get(member.pod_uid)
        if record is None or record.member.address != member.address:
            record = MemberRecord(member=member, poll_at=draft.now)
        elif record.member != member:
            record = replace(record, member=member, poll_at=draft.now)
        members[member.pod_uid] = record
    draft.change(roster=roster, members=members)
    draft.publish()


def poll_members(draft: Draft) -> None:
    """Ask every member whose turn it is for its report."""
    for uid, record in draft.state.members.items():
        if record.call is None and record.poll_at <= draft.now and record.member.address:
            number = draft.call(record, Verb.REPORT, None, draft.state.timing.call)
            draft.change_member(uid, call=number)


def accept_report(draft: Draft, pod_uid: str, report: WorkerReport, call: int) -> None:
    """Note what a member says of itself; a report of another pod behind its address counts as silence."""
    record = draft.state.members.get(pod_uid)
    if record is None:
        return
    if report.pod_uid != pod_uid or report.fleet_uid != draft.state.identity.fleet_uid:
        wrong_pod = report.pod_uid != pod_uid
        expected, found = (pod_uid, report.pod_uid) if wrong_pod else (draft.state.identity.fleet_uid, report.fleet_uid)
        note_failure(
            draft,
            pod_uid,
            Problem(
                code=ProblemCode.WRONG_POD if wrong_pod else ProblemCode.WRONG_FLEET,
                message=(
                    f"{record.member.address} answers as {report.pod_name} of {'pod' if wrong_pod else 'fleet'} uid {found}, "
                    f"not as {record.pod_name} of {expected}"
                ),
                member=record.pod_name,
            ),
        )
        return
    restarted = record.report is not None and record.report.instance != report.instance
    before = is_admitted(record, draft.state.version), serves(record)
    draft.change_member(
        pod_uid,
        report=report,
        reported_by=call,
        failure=None,
        failing_since=float("inf"),
        abort_owed=record.abort_owed and not restarted,
        pause_failed=record.pause_failed and report.staged and not restarted,
    )
    if report.epoch > draft.state.epoch:
        draft.change(epoch=report.epoch, group=None)
    schedule_poll(draft, pod_uid)
    changed = draft.state.members[pod_uid]
    if record.failure is not None or before != (is_admitted(changed, draft.state.version), serves(changed)):
        draft.publish()


def note_swap(draft: Draft, pod_uid: str, version: int, call: int) -> None:
    """Note that a member has put a staged version in place and serves it, without waiting for its next report to say so."""
    record = draft.state.members.get(pod_uid)
    if record is None or record.report is None or record.failure is not None:
        return
    held = {"state": WorkerState.SERVING, "version": version, "admitted": version, "stale_seconds": None}
    report = record.report.model_copy(update={**held, "version_in_flight": 0, "staged": False, "message": ""})
    draft.change_member(pod_uid, report=report, reported_by=call)


def note_failure(draft: Draft, pod_uid: str, problem: Problem) -> None:
    """Note that a member could not be asked, or gave no sound answer."""
    record = draft.state.members.get(pod_uid)
    if record is None:
        return
    draft.change_member(
        pod_uid,
        failure=problem,
        failing_since=min(record.failing_since, draft.now),
        poll_at=draft.now + draft.state.timing.poll,
    )
    if record.failure is None:
        draft.publish()


def poll_again(draft: Draft) -> None:
    """Ask every member anew, now; the answer to a poll under way would not count."""
    for uid in draft.state.members:
        poll_member_again(draft, uid)


def poll_member_again(draft: Draft, pod_uid: str) -> None:
    """Ask this member anew, now; the answer to a poll under way would not count."""
    record = draft.state.members.get(pod_uid)
    if record is None:
        return
    pending = draft.state.calls.get(record.call) if record.call is not None else None
    if pending is not None and pending.verb is Verb.REPORT:
        draft.cancel_calls({pending.number})
        draft.change_member(pod_uid, call=None)
    draft.change_member(pod_uid, poll_at=draft.now)


def schedule_poll(draft: Draft, pod_uid: str) -> None:
    """Next report soon while something is amiss or a refit runs, at the heartbeat's pace otherwise."""
    record = draft.state.members[pod_uid]
    timing = draft.state.timing
    calm = is_admitted(record, draft.state.version) and draft.state.active is None
    draft.change_member(pod_uid, poll_at=draft.now + (timing.heartbeat if calm else timing.poll))


def is_on_loan(state: State, pod_uid: str) -> bool:
    """Whether the member lends or borrows now."""
    loan = state.loans.get(pod_uid)
    borrows = loan is not None and bool(loan.donor)
    return borrows or any(other.donor == pod_uid for other in state.loans.values())


def hold_reason(state: State) -> str:
    """Why whole engines refuse requests since a refit failed; empty where they need not."""
    holds = state.record is not None and state.policy.on_failure is OnFailure.HOLD
    return state.record.held if holds and state.record is not None else ""


def is_settled(state: State) -> bool:
    """Whether the committed version is known and no refit is about to change it."""
    return not state.reading and (state.active is None or state.active.step is Step.GATHER)


def reconcile_member(draft: Draft, pod_uid: str) -> None:
    """Give a member the one call that brings it nearer to the committed version."""
    state = draft.state
    record = state.members.get(pod_uid)
    if record is None or record.call is not None or record.report is None or record.failure is not None:
        return
    if not is_settled(state):
        return
    report = record.report
    if is_on_loan(state, pod_uid):
        return
    if _missed_commit(state, report):
        if not _must_stand_still(state, report):
            _background(draft, record, report, Verb.COMMIT)
        elif not rolls(state) or may_take_out(state, draft.now):
            _background(draft, record, report, Verb.PAUSE)
    elif report.state in STUCK or report.staged or record.abort_owed:
        _background(draft, record, report, Verb.ABORT)
    elif report.lending:
        _background(draft, record, report, Verb.LET_GO)
    elif report.state in WHOLE and (not is_told(state, report) or report.held != bool(hold_reason(state))):
        _background(draft, record, report, Verb.ADMIT)
    elif report.state is WorkerState.PAUSED:
        _background(draft, record, report, Verb.RESUME)


def _missed_commit(state: State, report: WorkerReport) -> bool:
    """Whether the member holds what was committed; the same version of an earlier attempt was never verified."""
    return (
        state.record is not None
        and (report.state is WorkerState.RECEIVED or report.staged)
        and report.version_in_flight == state.version
        and report.epoch >= state.record.epoch
    )


def _must_stand_still(state: State, report: WorkerReport) -> bool:
    """Whether the copy of a staged version needs a pause first; an adapter's never does, where it is known to be one."""
    last = state.refit
    adapter = last is not None and last.version == state.version and last.adapter is not None
    serves = report.staged and report.state is WorkerState.SERVING
    return serves and state.policy.pause is not PauseMode.KEEP and not adapter


def _background(draft: Draft, record: MemberRecord, report: WorkerReport, verb: Verb) -> None:
    uid = record.member.pod_uid
    version = draft.state.version
    if verb is Verb.ABORT and report.epoch >= draft.state.epoch:
        draft.raise_epoch()
    header = draft.header(uid, report.instance)
    seconds = draft.state.timing.call
    match verb:
        case Verb.PAUSE:
            policy = draft.state.policy
            pausing = float(policy.deadlines.pausing_seconds)
            seconds = pausing + GRACE_SECONDS
            # What is committed has to be published: where requests do not end in time, they are ended.
            mode = PauseMode.ABORT if record.pause_failed else policy.pause
            message: BaseModel = Pause(**header, mode=mode, deadline_seconds=pausing)
        case Verb.ABORT:
            message = Abort(**header, reason="no refit is under way")
        case Verb.LET_GO:
            message = LetGo(**header)
        case Verb.COMMIT:
            message = Commit(**header, version=version, cache=draft.state.policy.cache)
        case Verb.RESUME:
            message = Resume(**header)
        case _:
            stale = stale_seconds(draft.state, report, draft.now)
            message = Admit(**header, version=version, stale_seconds=stale, hold=hold_reason(draft.state))
    draft.change_member(uid, call=draft.call(record, verb, message, seconds))  # type: ignore[arg-type]


def finish_background(draft: Draft, call: PendingCall, answer: BaseModel) -> None:
    """Note the answer to a background call and go on to what follows from it."""
    pod_uid = call.pod_uid
    record = draft.state.members.get(pod_uid)
    if record is None:
        return
    draft.change_member(pod_uid, call=None)
    if isinstance(answer, WorkerReport):
        if call.verb is Verb.ABORT:
            draft.change_member(pod_uid, abort_owed=False)
        accept_report(draft, pod_uid, answer, call.number)
    gathers = draft.state.active is not None and draft.state.active.step is Step.GATHER
    if not isinstance(answer, WorkerReport) or (gathers and call.verb is not Verb.REPORT):
        draft.change_member(pod_uid, poll_at=draft.now)  # a refit that begins waits for what it asked for itself


def fail_background(draft: Draft, pod_uid: str, verb: Verb, problem: Problem, *, refused: bool) -> None:
    """Note that a background call failed; the next report decides what to do about it."""
    draft.change_member(pod_uid, call=None)
    if verb is Verb.PAUSE and (refused or problem.code is ProblemCode.DEADLINE_EXCEEDED):
        draft.change_member(pod_uid, pause_failed=True)
    if verb is Verb.LET_GO:
        draft.change_member(pod_uid, abort_owed=True)  # whatever it lends, it will not when it has left the epoch
    if verb is Verb.REPORT or not refused:
        note_failure(draft, pod_uid, problem)
    else:
        record = draft.state.members.get(pod_uid)
        if record is not None:
            draft.change_member(pod_uid, poll_at=draft.now + draft.state.timing.poll)


def tear_down_group(draft: Draft, reason: str, *, spare: frozenset[str] = frozenset()) -> None:
    """End the kept group: every member leaves it; whole ones go on serving.

    Those to ``spare`` leave it after their next report, when they have been told to commit what they may still hold.
    """
    group = draft.state.group
    if group is None:
        return
    draft.raise_epoch()
    abort_seats(draft, tuple(seat for seat in group.seats if seat.pod_uid not in spare), reason)
    for uid in spare:
        draft.change_member(uid, abort_owed=True)
    draft.publish()


def leave_epoch(draft: Draft, pod_uids: Iterable[str], reason: str) -> None:
    """Raise the epoch, and have these members leave the one before it together with the kept group's."""
    group = draft.state.group
    tear_down_group(draft, reason)
    if group is None:
        draft.raise_epoch()
    seated = {seat.pod_uid for seat in group.seats} if group is not None else set()
    for uid in sorted(set(pod_uids) - seated):
        record = draft.state.members.get(uid)
        if record is not None and record.report is not None:
            _abort_member(draft, record, record.report.instance, reason)


def leave_alone(draft: Draft, pod_uid: str, reason: str) -> None:
    """Have one member leave the epoch, and the kept group with it where the member is in there."""
    group, record = draft.state.group, draft.state.members.get(pod_uid)
    if record is None or record.report is None:
        return
    instance = record.report.instance
    if group is not None and any(seat.pod_uid == pod_uid and seat.instance == instance for seat in group.seats):
        tear_down_group(draft, reason)
    else:
        _abort_member(draft, record, instance, reason)


def let_go(draft: Draft, pod_uid: str) -> None:
    """Have a member end its lending; it stays in the kept group."""
    record = draft.state.members.get(pod_uid)
    if record is None or record.report is None or record.abort_owed:
        return
    if record.call is not None:
        draft.cancel_calls({record.call})  # the next one is due after this one's answer
    message = LetGo(**draft.header(pod_uid, record.report.instance))
    draft.change_member(pod_uid, call=draft.call(record, Verb.LET_GO, message, draft.state.timing.call))


def abort_seats(draft: Draft, seats: tuple[Seat, ...], reason: str) -> None:
    """Tell members to leave the epoch before the current one, without waiting for their answers."""
    for seat in seats:
        record = draft.state.members.get(seat.pod_uid)
        if record is not None:
            _abort_member(draft, record, seat.instance, reason)


def _abort_member(draft: Draft, record: MemberRecord, instance: str, reason: str) -> None:
    if record.call is not None:
        draft.cancel_calls({record.call})  # its answer may be older than the abort
    uid = record.member.pod_uid
    message = Abort(**draft.header(uid, instance), reason=reason[:REASON_LENGTH])
    number = draft.call(record, Verb.ABORT, message, draft.state.timing.call)
    draft.change_member(uid, call=number, abort_owed=True)
