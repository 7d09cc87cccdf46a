"""How a refit ends, or one attempt of it: complete, failed before anything changed, or aborted on every member."""

from collections.abc import Mapping
from dataclasses import replace

from rolloutfleet.contract.policy import OnFailure
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import Abort, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.ledger import name_some
from rolloutfleet_sync.protocol.members import REASON_LENGTH, abort_seats, accept_report, tear_down_group
from rolloutfleet_sync.protocol.model import Refit, State, Step, Verb

HOLD_LENGTH = 1000
STANDSTILL_SECONDS = 5.0
"""A deadline that is noticed by so much too late was not seen to: the process or its node was halted."""
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
    """Give the refit up for this reason, whoever is left.

    A refit whose commit has been handed to the store is past this point and is left alone; one that is being given up already keeps its
    first reason.
    """
    refit = draft.state.active
    if refit is None or refit.decided or refit.final:
        return
    problem = Problem(code=code, message=message, phase=refit.phase.value, member=member)
    draft.change_refit(final=True)
    if refit.step is Step.ABORT:
        draft.change_refit(problem=problem)
    elif refit.step in {Step.GATHER, Step.CHECK}:
        draft.cancel_refit_calls(refit.id)
        draft.change_refit(problem=problem)
        tear_down_group(draft, f"refit of version {refit.version} failed")
        finish_refit(draft, Phase.FAILED)
    else:
        _abort(draft, problem)


def lose_seats(draft: Draft, lost: Mapping[str, tuple[ProblemCode, str]]) -> None:
    """Abort this attempt since these members, by pod uid, are out of it for these reasons; another one may follow without them."""
    refit = draft.state.active
    if refit is None or refit.decided or not lost:
        return
    phase = refit.phase.value
    if refit.step is Step.ABORT and refit.problem is not None:
        phase = refit.problem.phase  # in which the attempt was when it ended
    problems = {
        uid: Problem(code=code, message=message, phase=phase, member=refit.seat(uid).pod_name)
        for uid, (code, message) in lost.items()
    }
    draft.change_refit(lost={**problems, **refit.lost})
    if refit.step is Step.ABORT:
        draft.change_refit(waiting=refit.waiting - problems.keys())
    else:
        _abort(draft, next(iter(problems.values())))


def suspect(draft: Draft, code: ProblemCode, message: str, member: str, cut_off: frozenset[str] = frozenset()) -> None:
    """Abort this attempt for what one party says of another: whoever then does not answer is lost, or else whoever is ``cut_off``."""
    refit = draft.state.active
    if refit is None or refit.decided or refit.step in {Step.GATHER, Step.CHECK}:
        return
    if refit.step is Step.ABORT:
        draft.change_refit(cut_off=refit.cut_off | cut_off)
        return
    draft.change_refit(cut_off=cut_off)
    _abort(draft, Problem(code=code, message=message, phase=refit.phase.value, member=member))


def _abort(draft: Draft, problem: Problem) -> None:
    """Free every member from the epoch; those that are known to be lost are told too, and not waited for."""
    refit = draft.refit
    draft.cancel_refit_calls(refit.id)
    draft.change(write=None)
    epoch = draft.raise_epoch()
    if refit.repair and draft.state.record is not None:
        # Who received in the epoch that is over holds the committed version by its number alone, and is never told to commit it.
        draft.change(record=draft.state.record.above(epoch, 0))
    enter_phase(draft, Phase.ABORTING, Step.ABORT, draft.state.timing.aborting)
    reason = f"refit of version {refit.version}: {problem.message}"[:REASON_LENGTH]
    draft.change_refit(first_call=draft.state.next_id)
    waiting = set()
    for seat in refit.seats:
        record = draft.state.members.get(seat.pod_uid)
        if record is None:
            continue
        if seat.pod_uid in refit.lost:
            abort_seats(draft, (seat,), reason)
            continue
        waiting.add(seat.pod_uid)
        if record.call is not None:
            draft.cancel_calls({record.call})  # its answer may be older than the abort
        draft.change_member(seat.pod_uid, abort_owed=True, call=None)
        message = Abort(**draft.header(seat.pod_uid, seat.instance, epoch), reason=reason)
        draft.call(record, Verb.ABORT, message, draft.state.timing.aborting, refit=refit.id)
    draft.change_refit(problem=problem, waiting=frozenset(waiting))


def note_abort_answer(draft: Draft, pod_uid: str, answer: WorkerReport, call: int) -> None:
    """One member has left the epoch."""
    draft.change_member(pod_uid, abort_owed=False)
    seat = draft.refit.seat(pod_uid)
    accept_report(draft, pod_uid, answer, call)
    if answer.state is WorkerState.FAILED:
        _lose_in_abort(draft, pod_uid, f"{seat.pod_name} failed: {answer.message}")
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})


def note_abort_failure(draft: Draft, pod_uid: str, problem: Problem, *, refused: bool) -> None:
    """One member could not be told; it is told again whenever it answers."""
    name = draft.refit.seat(pod_uid).pod_name
    restarted = refused and problem.code is ProblemCode.WRONG_POD
    _lose_in_abort(draft, pod_uid, f"the container of {name} restarted" if restarted else problem.message)


def give_up_aborting(draft: Draft) -> None:
    """The deadline has passed: members that did not answer are lost, and are told later."""
    refit = draft.refit
    draft.cancel_refit_calls(refit.id)
    for uid in sorted(refit.waiting):
        name = refit.seat(uid).pod_name
        _lose_in_abort(draft, uid, f"{name} did not leave the group within {draft.state.timing.aborting:g} s")


def _lose_in_abort(draft: Draft, pod_uid: str, message: str) -> None:
    """Count a member as lost; and name it, where all that was known so far is a victim's broken connection."""
    problem = draft.refit.problem
    victims = problem is not None and problem.code is ProblemCode.PEER_LOST
    if problem is not None and victims:
        message = f"{message}; first noticed as: {problem.message}"
    lose_seats(draft, {pod_uid: (ProblemCode.MEMBER_ABSENT, message)})
    if victims:
        draft.change_refit(problem=draft.refit.lost[pod_uid])


def describe_standstill(late: float) -> str:
    """What to add to a time that was noticed so many seconds too late; empty where that is no more than usual."""
    return f" (the sync job itself stood still for {late:.0f} s of it)" if late >= STANDSTILL_SECONDS else ""


def describe_shortage(left: int, least: int) -> str:
    """The end of a sentence about a loss, where too few members are left."""
    return f"; {left} engine{' is' if left == 1 else 's are'} left, refit.minReady is {least}" if left else ""


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
        held = record.held
        if phase is Phase.FAILED and not refit.committed and refit.problem is not None:
            held = describe_hold(draft.state, refit.version, refit.problem.message)
        draft.change(record=record.model_copy(update={"intent": None, "held": held}))
    for uid in draft.state.members:
        draft.change_member(uid, poll_at=min(draft.state.members[uid].poll_at, draft.now))
    draft.publish()


def describe_hold(state: State, version: int, why: str) -> str:
    """Why whole engines refuse requests from now on; empty where the policy lets them serve."""
    if state.policy.on_failure is not OnFailure.HOLD:
        return ""
    return f"the refit of version {version} failed: {why}"[:HOLD_LENGTH]


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
