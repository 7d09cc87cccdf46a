"""What follows when every member of an aborted attempt is free: another attempt with those that are left, or the refit's end.

The same refit brings the same version under a higher epoch, from the start, to the members that answered the abort as the processes that
they were. Each attempt has lost somebody, so there are no more attempts than members. The refit ends Failed where nobody is to blame but
the trainer, fewer than ``minReady`` are left, the trainer is gone, or it has fixed the size of the group.
"""

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Attempt, LostMember, Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.gathering import gather
from rolloutfleet_sync.protocol.model import Refit, Step
from rolloutfleet_sync.protocol.outcome import describe_shortage, enter_phase, finish_refit, lose_seats
from rolloutfleet_sync.protocol.rolling import reserves


def settle_abort(draft: Draft) -> None:
    """Go on once nobody is waited for any more to leave the aborted epoch; until then, or without an abort, nothing happens."""
    refit = draft.state.active
    if refit is None or refit.step is not Step.ABORT:
        return
    waiting = refit.waiting & draft.state.members.keys()
    if waiting:
        return
    if not refit.lost and refit.cut_off:
        reason = refit.problem.message if refit.problem is not None else "its connection ended"
        lose_seats(draft, dict.fromkeys(sorted(refit.cut_off), (ProblemCode.PEER_LOST, reason)))
    _lose_changed(draft)
    left = _survivors(draft)
    if _may_go_on(draft, len(left)):
        _begin_again(draft, left)
        return
    refit = draft.refit
    problem = refit.problem
    if problem is not None and refit.lost and not refit.final:
        least = draft.state.least_members(refit)
        shortage = describe_shortage(len(left), least)
        if len(left) < least and shortage:
            draft.change_refit(problem=problem.model_copy(update={"message": f"{problem.message}{shortage}"}))
    finish_refit(draft, Phase.FAILED)


def _lose_changed(draft: Draft) -> None:
    """Members that left the roster, have been told to end, or are other processes by now, are lost although nobody has said so."""
    for seat in draft.refit.seats:
        record = draft.state.members.get(seat.pod_uid)
        if seat.pod_uid in draft.refit.lost:
            continue
        if record is None:
            why = f"{seat.pod_name} left the fleet"
        elif record.report is None or record.report.instance != seat.instance or record.abort_owed:
            why = f"{seat.pod_name} is not the process that it was"
        elif record.report.state is WorkerState.FAILED:
            why = f"{seat.pod_name} failed: {record.report.message or 'no reason'}"
        elif record.report.leaving:
            why = f"{seat.pod_name} has been told to end and leaves the refit"
        else:
            continue
        lose_seats(draft, {seat.pod_uid: (ProblemCode.MEMBER_ABSENT, why)})


def _survivors(draft: Draft) -> dict[str, str]:
    refit = draft.refit
    seated = {seat.pod_uid: seat.instance for seat in refit.seats if seat.pod_uid not in refit.lost}
    return seated | reserves(draft.state, refit)


def _may_go_on(draft: Draft, left: int) -> bool:
    refit, session = draft.refit, draft.state.session
    return (
        bool(refit.lost)
        and not refit.final
        and not draft.state.stopping
        and session is not None
        and session.id == refit.session
        and session.request.world_size is None
        and left >= draft.state.least_members(refit)
    )


def _begin_again(draft: Draft, survivors: dict[str, str]) -> None:
    refit = draft.refit
    draft.cancel_refit_calls(refit.id)  # who was told to leave, and lost before it answered, is not of this attempt
    spent = dict(refit.seconds)
    for ended in refit.ended:
        for phase, seconds in ended.seconds.items():
            spent[phase] = spent[phase] - seconds
    enter_phase(draft, Phase.REFORMING, Step.GATHER, draft.state.policy.deadlines.forming_seconds)
    aborting = Phase.ABORTING.value
    spent[aborting] = spent.get(aborting, 0.0) + draft.refit.seconds[aborting] - refit.seconds.get(aborting, 0.0)
    attempt = Attempt(
        attempt=refit.attempt,
        epoch=refit.epoch,
        lost=tuple(
            _lost_member(refit, uid, problem)
            for uid, problem in sorted(refit.lost.items(), key=lambda item: refit.seat(item[0]).engine)
        ),
        seconds={phase: seconds for phase, seconds in spent.items() if seconds > 0},
    )
    draft.change_refit(
        attempt=refit.attempt + 1,
        ended=(*refit.ended, attempt),
        epoch=draft.state.epoch,
        survivors=survivors,
        lost={},
        cut_off=frozenset(),
        problem=None,
        waiting=frozenset(survivors),
        seats=(),
        choice=None,
        layouts={},
        faults={},
        received={},
        received_before={},
        arrived={},
        slowest="",
        sent=None,
        pause_started=refit.pause_started if _stands_still(draft, survivors) else None,
    )
    gather(draft)


def _lost_member(refit: Refit, pod_uid: str, problem: Problem) -> LostMember:
    return LostMember(
        pod_name=refit.seat(pod_uid).pod_name, phase=problem.phase, code=problem.code, message=problem.message
    )


def _stands_still(draft: Draft, survivors: dict[str, str]) -> bool:
    """Whether an engine that was paused for the aborted attempt still does not serve."""
    reports = (draft.state.members[uid].report for uid in survivors)
    return any(report is not None and report.state is not WorkerState.SERVING for report in reports)
