"""What a refit does when a member does not answer, refuses, restarts, or is replaced.

Before the decision any of these aborts the attempt, and another one follows without the member, see
:mod:`~rolloutfleet_sync.protocol.reforming`. After it the version is published, so the member is a casualty: the others go on, and the
refit ends Failed, naming it.
"""

from rolloutfleet.contract.policy import CachePolicy
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import CommitReport, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.gathering import gather
from rolloutfleet_sync.protocol.ledger import TRAINER, name_some
from rolloutfleet_sync.protocol.members import accept_report, note_swap
from rolloutfleet_sync.protocol.model import MemberRecord, Refit, Seat, State, Step, Verb
from rolloutfleet_sync.protocol.outcome import (
    abort_refit,
    describe_standstill,
    give_up_aborting,
    lose_seats,
    note_abort_failure,
    suspect,
)
from rolloutfleet_sync.protocol.recovery import lose_commit
from rolloutfleet_sync.protocol.refit import (
    call_again,
    finish_commit_step,
    finish_resume_step,
    note_paused,
)

STILL = frozenset({WorkerState.PAUSED, WorkerState.DIRTY, WorkerState.ASLEEP})
"""States in which no step of the model runs."""


def lose_member(draft: Draft, pod_uid: str, code: ProblemCode, message: str) -> None:
    """Abort the attempt for this member's sake, or count it as a casualty when the version is already decided."""
    refit = draft.state.active
    if refit is None or all(seat.pod_uid != pod_uid for seat in refit.seats) or refit.step is Step.GATHER:
        return
    seat = refit.seat(pod_uid)
    if not refit.decided:
        lose_seats(draft, {pod_uid: (code, message)})
        return
    if pod_uid in refit.casualties:
        return
    problem = Problem(code=code, message=message, phase=refit.phase.value, member=seat.pod_name)
    draft.change_refit(
        casualties={**refit.casualties, pod_uid: problem},
        waiting=refit.waiting - {pod_uid},
        retry_at={uid: at for uid, at in refit.retry_at.items() if uid != pod_uid},
    )
    draft.publish()
    if refit.step is Step.COMMIT:
        finish_commit_step(draft)
    elif refit.step is Step.RESUME:
        finish_resume_step(draft)


def note_pause(draft: Draft, pod_uid: str, report: WorkerReport) -> None:
    """One member was asked to pause: it must stand still."""
    name = draft.refit.seat(pod_uid).pod_name
    if report.state in STILL:
        note_paused(draft, pod_uid)
    else:
        message = f"{name} is {report.state.value} after it was asked to pause"
        lose_member(draft, pod_uid, ProblemCode.WRONG_STATE, message)


def note_commit(draft: Draft, pod_uid: str, report: CommitReport, call: int) -> None:
    """One member has published the version; one that kept its prefix cache against the policy is dirty."""
    refit = draft.refit
    name = refit.seat(pod_uid).pod_name
    if report.version != refit.version:
        lose_member(
            draft,
            pod_uid,
            ProblemCode.ENGINE_FAILED,
            f"{name} committed version {report.version} when asked for {refit.version}",
        )
        return
    must_reset = draft.state.policy.cache is CachePolicy.RESET and refit.adapter is None
    if must_reset and report.cache_reset is not True:
        answer = "nothing" if report.cache_reset is None else "False"
        lose_member(
            draft,
            pod_uid,
            ProblemCode.CACHE_NOT_RESET,
            f"{name} did not reset its prefix cache (it answered {answer}) and refuses to generate until a later refit completes",
        )
        return
    draft.change_refit(waiting=refit.waiting - {pod_uid})
    if report.state is WorkerState.SERVING:
        note_swap(draft, pod_uid, refit.version, call)
    else:
        draft.change_refit(left_paused=draft.refit.left_paused | {pod_uid})
    if report.pause_seconds is not None and refit.pause_started is None:
        draft.change_refit(pause_seconds=max(draft.refit.pause_seconds, report.pause_seconds))
    finish_commit_step(draft)


def note_resume(draft: Draft, pod_uid: str, report: WorkerReport, call: int) -> None:
    """One member was asked to generate again: it must be the process that committed, with the version that it committed."""
    refit = draft.refit
    seat = refit.seat(pod_uid)
    accept_report(draft, pod_uid, report, call)
    if report.instance != seat.instance:
        lose_member(draft, pod_uid, ProblemCode.MEMBER_ABSENT, _describe_restart(seat, report))
        return
    if report.state not in {WorkerState.SERVING, WorkerState.ASLEEP} or report.version != refit.version:
        message = (
            f"{seat.pod_name} is {report.state.value} with version {report.version} after it was asked to resume with "
            f"{refit.version}"
        )
        lose_member(draft, pod_uid, ProblemCode.WRONG_STATE, message)
        return
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    finish_resume_step(draft)


def note_refit_failure(draft: Draft, pod_uid: str, verb: Verb, problem: Problem, *, refused: bool) -> None:
    """A call of the refit failed: repeat what is idempotent and got no answer, else the member is lost."""
    refit = draft.refit
    if verb is Verb.ABORT:
        note_abort_failure(draft, pod_uid, problem, refused=refused)
    elif verb in {Verb.COMMIT, Verb.RESUME} and not refused and pod_uid not in draft.state.members:
        lose_member(draft, pod_uid, ProblemCode.MEMBER_ABSENT, _describe_fate(draft, refit.seat(pod_uid)))
    elif verb in {Verb.COMMIT, Verb.RESUME} and not refused:
        if pod_uid in refit.waiting:
            draft.change_refit(retry_at={**refit.retry_at, pod_uid: draft.now + draft.state.timing.retry})
    else:
        name = refit.seat(pod_uid).pod_name
        message = problem.message if name in problem.message else f"{name}: {problem.message}"
        if refused and problem.code in {ProblemCode.PEER_LOST, ProblemCode.STALE_EPOCH}:
            suspect(draft, problem.code, message, name)
        else:
            lose_member(draft, pod_uid, problem.code, message)


def observe_member(draft: Draft, pod_uid: str) -> None:
    """Compare a member's newest report with its seat in the refit under way."""
    refit = draft.state.active
    record = draft.state.members.get(pod_uid)
    if refit is None or record is None or record.report is None or record.failure is not None:
        return
    if refit.step in {Step.GATHER, Step.ABORT} or all(seat.pod_uid != pod_uid for seat in refit.seats):
        return
    seat = refit.seat(pod_uid)
    report = record.report
    if report.instance != seat.instance:
        lose_member(draft, pod_uid, ProblemCode.MEMBER_ABSENT, _describe_restart(seat, report))
    elif report.leaving and not refit.decided:
        message = f"{seat.pod_name} has been told to end and leaves the refit"
        lose_member(draft, pod_uid, ProblemCode.MEMBER_ABSENT, message)
    elif report.state is WorkerState.FAILED:
        lose_member(
            draft,
            pod_uid,
            ProblemCode.ENGINE_FAILED,
            f"vLLM of {seat.pod_name} failed: {report.message or 'no reason'}",
        )
    elif (
        not refit.decided
        and record.reported_by >= refit.received_before.get(pod_uid, draft.state.next_id)
        and not _holds_received(report, refit.version, staged=refit.staged)
    ):
        detail = f" ({report.message})" if report.message else ""
        lose_member(
            draft,
            pod_uid,
            ProblemCode.WRONG_STATE,
            f"{seat.pod_name} no longer holds version {refit.version}: it is {report.state.value}{detail}",
        )


def _describe_restart(seat: Seat, report: WorkerReport) -> str:
    return f"the container of {seat.pod_name} restarted during the refit: instance {seat.instance} became {report.instance}"


def _holds_received(report: WorkerReport, version: int, *, staged: bool) -> bool:
    whole = report.staged if staged else report.state is WorkerState.RECEIVED
    return whole and report.version_in_flight == version


def observe_roster(draft: Draft) -> None:
    """Compare the roster with the seats of the refit under way; pods that came in addition wait for the next refit."""
    refit = draft.state.active
    if refit is None:
        return
    if refit.step is Step.GATHER:
        gather(draft)
        return
    members = draft.state.members
    for seat in refit.seats:
        record = members.get(seat.pod_uid)
        if record is not None and record.member.address == seat.address and record.member.ranks == seat.ranks:
            continue
        if record is None and refit.decided:
            continue  # told to end, it finishes what is decided within its grace; a call that gets no answer tells of one that is gone
        lose_member(draft, seat.pod_uid, ProblemCode.MEMBER_ABSENT, _describe_fate(draft, seat))


def _describe_fate(draft: Draft, seat: Seat) -> str:
    """What has become of a pod that the roster does not hold as it was."""
    record = draft.state.members.get(seat.pod_uid)
    heir = next((r.pod_name for r in draft.state.members.values() if r.member.engine == seat.engine), None)
    if record is not None:
        fate = f"{seat.pod_name} moved from {seat.address} to {record.member.address or 'no address'}"
    elif heir is not None:
        fate = f"{seat.pod_name} of engine {seat.engine} was replaced by {heir}"
    else:
        fate = f"{seat.pod_name} of engine {seat.engine} left the fleet"
    return f"{fate} during the refit"


def lose_silent_members(draft: Draft) -> None:
    """Members of the refit that have not answered for too long are lost before the phase's deadline."""
    refit = draft.state.active
    if refit is None or refit.step in {Step.GATHER, Step.ABORT, Step.RECORD}:
        return
    for seat in refit.seats:
        record = draft.state.members.get(seat.pod_uid)
        if record is None or record.failure is None:
            continue
        if draft.now - record.failing_since >= draft.state.timing.unreachable:
            message = (
                f"{seat.pod_name} has not answered for {draft.state.timing.unreachable:g} s: {record.failure.message}"
            )
            lose_member(draft, seat.pod_uid, ProblemCode.MEMBER_ABSENT, message)


def repeat_calls(draft: Draft) -> None:
    """Repeat the calls whose turn it is."""
    refit = draft.state.active
    for pod_uid, at in sorted(refit.retry_at.items() if refit else ()):
        if at <= draft.now and draft.state.active is not None:
            call_again(draft, pod_uid)


def enforce_deadline(draft: Draft) -> None:
    """End a phase whose time is up."""
    refit = draft.state.active
    if refit is None or draft.now < refit.deadline:
        return
    spent = f"{draft.now - refit.phase_started:.0f} s{describe_standstill(draft.now - refit.deadline)}"
    match refit.step:
        case Step.ABORT:
            give_up_aborting(draft)
        case Step.GATHER:
            gather(draft)
            if draft.refit.active and draft.refit.step is Step.GATHER:
                message, member = describe_absent(draft, spent)
                abort_refit(draft, ProblemCode.MEMBER_ABSENT, message, member)
        case Step.INTENT:
            abort_refit(
                draft, ProblemCode.DEADLINE_EXCEEDED, f"the intent could not be written to the status within {spent}"
            )
        case Step.RECORD:
            lose_commit(draft, f"no answer within {spent}")
        case Step.COMMIT | Step.RESUME:
            for pod_uid in sorted(refit.waiting):
                name = refit.seat(pod_uid).pod_name
                message = f"{name} did not answer {refit.step.value} within {spent}"
                lose_member(draft, pod_uid, ProblemCode.DEADLINE_EXCEEDED, message)
        case _:
            _end_late_step(draft, spent)


def _end_late_step(draft: Draft, spent: str) -> None:
    """Nobody waits any longer: who of the engines alone has not answered is lost; where none of them has, any party may be to blame."""
    refit = draft.refit
    waited = [refit.seat(uid).pod_name for uid in refit.waiting]
    names = waited + ([TRAINER] if refit.trainer_pending else [])
    message = f"phase {refit.phase.value} ended after {spent}: no answer to {refit.step.value} from {name_some(names)}"
    blamed = names[0] if len(names) == 1 else ""
    nobody_holds_anything = refit.step is Step.CHECK and len(waited) == len(
        refit.seats
    )  # no group is there to be freed
    if not waited or nobody_holds_anything:
        abort_refit(draft, ProblemCode.DEADLINE_EXCEEDED, message, blamed)
    elif len(waited) < len(refit.seats):
        lose_seats(draft, dict.fromkeys(sorted(refit.waiting), (ProblemCode.DEADLINE_EXCEEDED, message)))
    else:
        suspect(draft, ProblemCode.DEADLINE_EXCEEDED, message, blamed)


def describe_absent(draft: Draft, spent: str) -> tuple[str, str]:
    """Who is missing from the ledger and why; and the pod to blame when there is one only."""
    roster = draft.state.roster
    if roster is None or not roster.engines:
        return f"the fleet has no engines: waited {spent} for a member", ""
    absent = find_absent(draft.state, draft.refit)
    reasons = [f"{name if pod else name.replace('-', ' ')} {why}" for name, why, pod in absent]
    more = f"; and {len(reasons) - 16} more" if len(reasons) > 16 else ""
    message = f"{len(absent)} of {roster.engines} engines did not come within {spent}: {'; '.join(reasons[:16])}{more}"
    return message, absent[0][0] if len(absent) == 1 and absent[0][2] else ""


def find_absent(state: State, refit: Refit) -> list[tuple[str, str, bool]]:
    """Who is missing from the ledger that a refit gathers: name, why, and whether it has a pod; those without one first."""
    roster = state.roster
    engines = roster.missing if roster is not None else ()
    missing = [(f"engine-{engine}", "has no pod", False) for engine in engines]
    waited = [record for uid, record in sorted(state.members.items()) if uid in refit.waiting]
    return missing + [(record.pod_name, _absence(record), True) for record in waited]


def _absence(record: MemberRecord) -> str:
    if not record.member.address:
        return "has no address yet"
    if record.failure is not None:
        return f"does not answer: {record.failure.message}"
    if record.report is None:
        return "has not answered yet"
    detail = f" ({record.report.message})" if record.report.message else ""
    advice = "; wake the fleet first" if record.report.state is WorkerState.ASLEEP else ""
    return f"is {record.report.state.value}{detail}{advice}"


def lose_trainer(draft: Draft, code: ProblemCode, message: str) -> None:
    """The trainer is gone: give up what is not decided; what is decided goes on without it."""
    if draft.state.active is not None:
        abort_refit(draft, code, message, TRAINER)
