"""How a refit ends: complete, failed before anything changed, or aborted on every member."""

from dataclasses import replace

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Abort, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.ledger import name_some
from rolloutfleet_sync.protocol.members import accept_report, tear_down_group
from rolloutfleet_sync.protocol.model import Refit, Step, Verb

KEPT_REFITS = 16
"""Ended refits that trainers may still ask for."""


def enter_phase(draft: Draft, phase: Phase, step: Step, seconds: float) -> None:
    """Move the refit on; the time spent in the phase that ends is added to its seconds."""
    refit = draft.refit
    spent = {**refit.seconds}
    if refit.phase is not Phase.PENDING:
        spent[refit.phase.value] = spent.get(refit.phase.value, 0.0) + draft.now - refit.phase_started
    draft.change_refit(
        phase=phase,
        step=step,
        seconds=spent,
        phase_started=draft.now,
        deadline=draft.now + seconds,
        waiting=frozenset(),
        retry_at={},
        trainer_pending=False,
    )
    draft.publish()


def abort_refit(draft: Draft, code: ProblemCode, message: str, member: str = "") -> None:
    """Give the refit up for this reason.

    A refit whose commit has been handed to the store is past this point and is left alone; one that is being aborted keeps its first
    reason.
    """
    refit = draft.state.active
    if refit is None or refit.decided or refit.phase is Phase.ABORTING:
        return
    problem = Problem(code=code, message=message, phase=refit.phase.value, member=member)
    draft.cancel_refit_calls(refit.id)
    draft.change(write=None)
    if refit.step in {Step.GATHER, Step.CHECK}:
        draft.change_refit(problem=problem)
        tear_down_group(draft, f"refit of version {refit.version} failed")
        finish_refit(draft, Phase.FAILED)
        return
    epoch = draft.raise_epoch()
    enter_phase(draft, Phase.ABORTING, Step.ABORT, draft.state.timing.aborting)
    waiting = set()
    for seat in refit.seats:
        record = draft.state.members.get(seat.pod_uid)
        if record is None:
            continue
        waiting.add(seat.pod_uid)
        draft.change_member(seat.pod_uid, abort_owed=True)
        reason = f"refit of version {refit.version}: {message}"[:2000]
        message_out = Abort(**draft.header(seat.pod_uid, seat.instance, epoch), reason=reason)
        draft.call(record, Verb.ABORT, message_out, draft.state.timing.aborting, refit=refit.id)
    draft.change_refit(problem=problem, waiting=frozenset(waiting))
    _finish_abort_when_done(draft)


def note_abort_answer(draft: Draft, pod_uid: str, answer: WorkerReport, call: int) -> None:
    """One member has left the epoch."""
    draft.change_member(pod_uid, abort_owed=False)
    seat = draft.refit.seat(pod_uid)
    if answer.state is WorkerState.FAILED:
        _blame(draft, seat.pod_name, f"{seat.pod_name} failed: {answer.message}")
    accept_report(draft, pod_uid, answer, call)
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    _finish_abort_when_done(draft)


def note_abort_failure(draft: Draft, pod_uid: str, problem: Problem, *, refused: bool) -> None:
    """One member could not be told; it is told again whenever it answers."""
    name = draft.refit.seat(pod_uid).pod_name
    if not refused:
        _blame(draft, name, problem.message)
    elif problem.code is ProblemCode.WRONG_POD:
        _blame(draft, name, f"the container of {name} restarted")
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    _finish_abort_when_done(draft)


def give_up_aborting(draft: Draft) -> None:
    """The deadline has passed: members that did not answer are told later."""
    draft.cancel_refit_calls(draft.refit.id)
    draft.change_refit(waiting=frozenset())
    _finish_abort_when_done(draft)


def drop_from_abort(draft: Draft, pod_uid: str) -> None:
    """A member that left the roster is not waited for."""
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    _finish_abort_when_done(draft)


def _blame(draft: Draft, pod_name: str, message: str) -> None:
    """Name the member that is really gone, where all that was known so far is a victim's broken connection."""
    problem = draft.refit.problem
    if problem is None or problem.code is not ProblemCode.TRANSFER_FAILED:
        return
    draft.change_refit(
        problem=Problem(
            code=ProblemCode.MEMBER_ABSENT,
            message=f"{message}; first noticed as: {problem.message}",
            phase=problem.phase,
            member=pod_name,
        )
    )


def _finish_abort_when_done(draft: Draft) -> None:
    if not draft.refit.waiting:
        finish_refit(draft, Phase.FAILED)


def finish_committed(draft: Draft) -> None:
    """End a refit whose version is published: Complete, or Failed naming the members that did not follow."""
    refit = draft.refit
    if refit.pause_started is not None:
        draft.change_refit(pause_seconds=draft.now - refit.pause_started)
    if not refit.casualties:
        _keep_layouts(draft)
        finish_refit(draft, Phase.COMPLETE)
        return
    seats = {seat.pod_uid: seat for seat in refit.seats}
    ordered = sorted(refit.casualties.items(), key=lambda item: seats[item[0]].engine)
    first = ordered[0][1]
    sentences = "; ".join(problem.message for _, problem in ordered[:8])
    more = f"; and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    others = [seat.pod_name for seat in refit.seats if seat.pod_uid not in refit.casualties]
    served = f"{name_some(others)} serve it" if others else "no engine serves it yet"
    draft.change_refit(
        problem=Problem(
            code=first.code,
            message=f"version {refit.version} is committed and {served}, but {sentences}{more}",
            phase=first.phase,
            member=first.member,
        )
    )
    tear_down_group(draft, f"refit of version {refit.version} left members behind", spare=frozenset(refit.casualties))
    finish_refit(draft, Phase.FAILED)


def _keep_layouts(draft: Draft) -> None:
    """What this load has taught the engines of their layouts counts from the next refit on."""
    group, refit = draft.state.group, draft.refit
    learned = {uid: report.layouts for uid, report in refit.received.items() if report.layouts}
    if group is not None and learned:
        layouts = {**refit.layouts, **learned}
        draft.change(group=replace(group, layouts={**group.layouts, refit.manifest_digest: layouts}))


def finish_refit(draft: Draft, phase: Phase) -> None:
    """End the refit in this terminal phase; its intent is no longer true."""
    enter_phase(draft, phase, Step.NONE, float("inf"))
    draft.change_refit(manifest=None)
    refit = draft.refit
    draft.change(finished=(*draft.state.finished, refit)[-KEPT_REFITS:])
    record = draft.state.record
    if record is not None:
        draft.change(record=record.model_copy(update={"intent": None}))
    for uid in draft.state.members:
        draft.change_member(uid, poll_at=min(draft.state.members[uid].poll_at, draft.now))
    draft.publish()


def fail_queued(draft: Draft, refit: Refit, code: ProblemCode, message: str) -> None:
    """End a refit that never began."""
    failed = replace(
        refit,
        phase=Phase.FAILED,
        sequence=refit.sequence + 1,
        manifest=None,
        problem=Problem(code=code, message=message, phase=Phase.PENDING.value),
    )
    draft.change(queued=None, finished=(*draft.state.finished, failed)[-KEPT_REFITS:])
