"""The only way to change a state: one event in, the next state and its commands out."""

from pydantic import BaseModel

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import (
    CacheReport,
    CheckReport,
    CommitReport,
    JoinReport,
    LendReport,
    PrepareReport,
    ReceiveReport,
    WorkerReport,
)
from rolloutfleet_sync.protocol import (
    events,
    forming,
    gathering,
    latejoin,
    losses,
    members,
    outcome,
    recovery,
    refit,
    reforming,
    rounds,
    sessions,
    staleness,
)
from rolloutfleet_sync.protocol.commands import Command
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.model import PendingCall, State, Step, Verb

ANSWERS: dict[Verb, type[BaseModel]] = {
    Verb.REPORT: WorkerReport,
    Verb.ADMIT: WorkerReport,
    Verb.CHECK: CheckReport,
    Verb.JOIN: JoinReport,
    Verb.PREPARE: PrepareReport,
    Verb.PAUSE: WorkerReport,
    Verb.RECEIVE: ReceiveReport,
    Verb.COMMIT: CommitReport,
    Verb.RESUME: WorkerReport,
    Verb.ABORT: WorkerReport,
    Verb.RESET_CACHE: CacheReport,
    Verb.SLEEP: WorkerReport,
    Verb.WAKE: WorkerReport,
    Verb.LEND: LendReport,
    Verb.LET_GO: WorkerReport,
    Verb.BORROW: ReceiveReport,
}
"""What a worker answers to each call."""

BEFORE_WEIGHTS_CHANGE = frozenset({Step.GATHER, Step.CHECK, Step.JOIN, Step.PREPARE, Step.INTENT, Step.PAUSE})


def step(state: State, event: events.Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """The state after this event and what is to be done; ``now`` is in seconds of a clock that never goes back.

    Raises ProblemError when a trainer's request is refused; the state is then unchanged.
    """
    draft = Draft(state, now)
    _handle(draft, event)
    staleness.note_publication(draft, state)
    reforming.settle_abort(draft)
    sessions.drop_orphaned_group(draft)
    forming.start_queued_refit(draft)
    return draft.state, tuple(draft.commands)


def _handle(draft: Draft, event: events.Event) -> None:
    match event:
        case events.Tick():
            _tick(draft)
        case events.CallAnswered(number, answer):
            _answered(draft, number, answer)
        case events.CallFailed(number, problem, refused):
            _failed(draft, number, problem, refused=refused)
        case events.RosterChanged(roster):
            members.change_roster(draft, roster)
            latejoin.lose_broken_loans(draft)
            losses.observe_roster(draft)
        case events.StatusRead(record):
            recovery.note_status(draft, record)
        case events.StatusUnreadable():
            recovery.note_unreadable(draft)
        case events.RecordWritten(write):
            _written(draft, write)
        case events.WriteFailed(write, message):
            _write_failed(draft, write, message)
        case events.CacheResetRequested(round_id):
            rounds.reset_caches(draft, round_id)
        case events.SleepRequested(round_id, wish):
            rounds.sleep_fleet(draft, round_id, wish)
        case events.WakeRequested(round_id, wish):
            rounds.wake_fleet(draft, round_id, wish)
        case events.HoldReleased():
            rounds.release(draft)
        case events.RoundShown(round_id):
            rounds.forget_round(draft, round_id)
        case events.StopRequested():
            _stop(draft)
        case _:
            _handle_trainer(draft, event)


def _handle_trainer(draft: Draft, event: events.Event) -> None:
    match event:
        case events.SessionOpened():
            sessions.open_session(draft, event)
        case events.SessionRenewed(session):
            sessions.renew_session(draft, session)
        case events.SessionClosed(session):
            held = sessions.require_session(draft.state, session)
            sessions.end_session(draft, f"trainer {held.request.trainer} closed its session")
        case events.RefitRequested():
            sessions.request_refit(draft, event)
        case events.TrainerHasJoined():
            sessions.note_trainer_joined(draft, event)
        case events.TrainerHasPrepared():
            sessions.note_trainer_prepared(draft, event)
        case events.TrainerHasSent():
            sessions.note_trainer_sent(draft, event)
        case events.TrainerHasFailed():
            sessions.note_trainer_failed(draft, event)


def _tick(draft: Draft) -> None:
    recovery.read_when_due(draft)
    sessions.expire_session(draft)
    losses.lose_silent_members(draft)
    losses.repeat_calls(draft)
    gathering.close_when_waited(draft)
    losses.enforce_deadline(draft)
    latejoin.lose_broken_loans(draft)
    members.poll_members(draft)


def _answered(draft: Draft, number: int, answer: BaseModel) -> None:
    call = draft.take_call(number)
    if call is None:
        return
    expected = ANSWERS[call.verb]
    if not isinstance(answer, expected):
        raise TypeError(
            f"the answer to {call.verb.value or 'report'} is a {type(answer).__name__}, not {expected.__name__}"
        )
    if call.round_id:
        rounds.note_round_answer(draft, call, answer)
    elif call.borrower:
        _loan_answered(draft, call, answer)
    elif call.refit:
        if draft.state.active is not None and draft.state.active.id == call.refit:
            _refit_answered(draft, call, answer)
    else:
        members.finish_background(draft, call, answer)
        rounds.ask_held(draft, call.pod_uid)
        if isinstance(answer, WorkerReport):
            latejoin.lose_broken_loans(draft)
            if call.verb is Verb.REPORT:
                members.reconcile_member(draft, call.pod_uid)
                latejoin.offer_loan(draft, call.pod_uid)
                latejoin.offer_to_waiting(draft)
            _observe(draft, call.pod_uid)


def _loan_answered(draft: Draft, call: PendingCall, answer: BaseModel) -> None:
    if isinstance(answer, LendReport):
        latejoin.note_lend(draft, call.borrower, answer)
    elif isinstance(answer, ReceiveReport):
        latejoin.note_borrow(draft, call.borrower, answer)


def _observe(draft: Draft, pod_uid: str) -> None:
    losses.observe_member(draft, pod_uid)
    active = draft.state.active
    if active is not None and active.step is Step.GATHER:
        gathering.gather_member(draft, pod_uid)


def _refit_answered(draft: Draft, call: PendingCall, answer: BaseModel) -> None:
    uid = call.pod_uid
    if uid not in draft.refit.waiting:
        return
    match answer:
        case CheckReport():
            forming.note_check(draft, uid, answer)
        case JoinReport():
            forming.note_join(draft, uid, answer)
        case PrepareReport():
            forming.note_prepare(draft, uid)
        case ReceiveReport():
            refit.note_receive(draft, uid, answer)
        case CommitReport():
            losses.note_commit(draft, uid, answer, call.number)
        case WorkerReport() if call.verb is Verb.PAUSE:
            losses.note_pause(draft, uid, answer)
        case WorkerReport() if call.verb is Verb.RESUME:
            losses.note_resume(draft, uid, answer, call.number)
        case WorkerReport() if call.verb is Verb.ABORT:
            outcome.note_abort_answer(draft, uid, answer, call.number)


def _failed(draft: Draft, number: int, problem: Problem, *, refused: bool) -> None:
    call = draft.take_call(number)
    if call is None:
        return
    if call.round_id:
        rounds.note_round_failure(draft, call, problem)
    elif call.borrower:
        latejoin.note_loan_failure(draft, call.borrower, call.verb, problem, refused=refused)
    elif call.refit:
        if draft.state.active is not None and draft.state.active.id == call.refit:
            losses.note_refit_failure(draft, call.pod_uid, call.verb, problem, refused=refused)
    else:
        members.fail_background(draft, call.pod_uid, call.verb, problem, refused=refused)
        rounds.fail_held(draft, call.pod_uid, problem)


def _written(draft: Draft, write: int) -> None:
    if draft.state.write != write:
        return
    draft.change(write=None)
    if draft.refit.step is Step.INTENT:
        refit.note_intent(draft)
    else:
        refit.note_record(draft)


def _write_failed(draft: Draft, write: int, message: str) -> None:
    if draft.state.write != write:
        return
    draft.change(write=None)
    if draft.refit.step is Step.INTENT:
        outcome.abort_refit(
            draft, ProblemCode.DEADLINE_EXCEEDED, f"the intent could not be written to the status: {message}"
        )
    else:
        recovery.lose_commit(draft, message)


def _stop(draft: Draft) -> None:
    draft.change(stopping=True)
    active = draft.state.active
    if active is not None and not active.decided and (active.step in BEFORE_WEIGHTS_CHANGE or active.staged):
        outcome.abort_refit(draft, ProblemCode.WRONG_STATE, "the sync job is stopping")


def may_publish(state: State) -> bool:
    """Whether a report may be written now: no durable write is under way or in doubt, and no engine waits for the sync job."""
    if state.record is None or state.reading or state.write is not None:
        return False
    return state.active is None or not state.active.may_hold_engines


def next_wakeup(state: State) -> float:
    """When the next :class:`~rolloutfleet_sync.protocol.events.Tick` is due; infinite when only an event can change anything."""
    times = [record.poll_at for record in state.members.values() if record.call is None and record.member.address]
    active = state.active
    if active is not None:
        times += [active.deadline, active.close_at, *active.retry_at.values()]
        times += [
            record.failing_since + state.timing.unreachable
            for seat in active.seats
            if seat.pod_uid not in active.casualties
            and active.step not in {Step.GATHER, Step.ABORT, Step.RECORD}
            and (record := state.members.get(seat.pod_uid))
        ]
    if state.session is not None:
        times.append(state.session.expires)
    if state.reading:
        times.append(state.read_at)
    return min(times, default=float("inf"))
