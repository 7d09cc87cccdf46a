"""Wishes of a trainer that go to every engine at once, outside refits: reset the prefix cache, sleep, wake."""

from dataclasses import replace

from pydantic import BaseModel

from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import SleepFleet, WakeFleet
from rolloutfleet.contract.worker import Call, ResetCache, Sleep, Wake, WorkerReport
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.fanout import GRACE_SECONDS
from rolloutfleet_sync.protocol.latejoin import end_loans
from rolloutfleet_sync.protocol.members import accept_report, poll_again, poll_member_again
from rolloutfleet_sync.protocol.model import PendingCall, Round, Verb

ACTS = {
    Verb.RESET_CACHE: "prefix caches are not reset",
    Verb.SLEEP: "engines do not sleep",
    Verb.WAKE: "engines do not wake",
}


def reset_caches(draft: Draft, round_id: str) -> None:
    """Ask every engine to drop its prefix cache; ProblemError while a refit is under way."""
    _begin(draft, round_id, Verb.RESET_CACHE, None, draft.state.timing.call)


def sleep_fleet(draft: Draft, round_id: str, wish: SleepFleet) -> None:
    """Ask every engine to sleep; ProblemError while a refit is under way. Loans end, and buffers for staging are gone."""
    _begin(draft, round_id, Verb.SLEEP, wish, draft.state.timing.sleeping)


def wake_fleet(draft: Draft, round_id: str, wish: WakeFleet) -> None:
    """Ask every engine to take back what the tags name, or everything; ProblemError while a refit is under way."""
    _begin(draft, round_id, Verb.WAKE, wish, draft.state.timing.sleeping)


def release(draft: Draft) -> None:
    """Let engines serve that are held since a refit failed; each is told when it has reported."""
    record = draft.state.record
    if record is None or not record.held:
        return
    draft.change(record=record.model_copy(update={"held": ""}))
    poll_again(draft)
    draft.publish()


def _begin(draft: Draft, round_id: str, verb: Verb, wish: SleepFleet | WakeFleet | None, seconds: float) -> None:
    _require_rest(draft, verb)
    if wish is not None:
        end_loans(draft, "the fleet is about to sleep or wake")
        group = draft.state.group
        draft.change(group=replace(group, prepared=None) if group is not None else None)
    state = draft.state
    present = {member.engine for member in state.roster.members} if state.roster else set()
    engines = state.roster.engines if state.roster else 0
    absent = {
        f"engine-{engine}": _absent(f"engine {engine} has no pod") for engine in range(engines) if engine not in present
    }
    answering = frozenset(uid for uid, record in state.members.items() if record.report and record.member.address)
    absent |= {
        record.pod_name: _absent(f"{record.pod_name} has not answered yet", record.pod_name)
        for uid, record in state.members.items()
        if uid not in answering
    }
    held = answering & _ending_loans(draft) if wish is not None else frozenset()
    begun = Round(round_id, verb, wish, seconds, answering, absent, held)
    draft.change(rounds={**state.rounds, round_id: begun})
    for uid in sorted(answering - held):
        _ask(draft, begun, uid)


def _ending_loans(draft: Draft) -> frozenset[str]:
    """Members that have been told to end a loan, or to leave an epoch, and have not answered."""
    calls = draft.state.calls
    return frozenset(
        uid
        for uid, record in draft.state.members.items()
        if record.call is not None and record.call in calls and calls[record.call].verb in {Verb.ABORT, Verb.LET_GO}
    )


def _ask(draft: Draft, asked: Round, pod_uid: str) -> None:
    record = draft.state.members[pod_uid]
    if record.report is None:
        raise AssertionError("only members that have answered are asked")
    header = draft.header(pod_uid, record.report.instance)
    match asked.wish:
        case SleepFleet(level=level):
            message: Call = Sleep(**header, level=level, deadline_seconds=asked.seconds)
        case WakeFleet(tags=tags):
            message = Wake(**header, tags=tags, deadline_seconds=asked.seconds)
        case None:
            message = ResetCache(**header)
    draft.call(record, asked.verb, message, asked.seconds + GRACE_SECONDS, round_id=asked.id)


def ask_held(draft: Draft, pod_uid: str) -> None:
    """Ask a member for what it was held back from, once it has ended its loan."""
    asked = next((each for each in draft.state.rounds.values() if pod_uid in each.held), None)
    if asked is None or pod_uid in _ending_loans(draft):
        return
    record = draft.state.members.get(pod_uid)
    if record is None or record.report is None:
        _note(draft, asked.id, pod_uid, _absent("it left the fleet before it was asked"))
        return
    draft.change(rounds={**draft.state.rounds, asked.id: replace(asked, held=asked.held - {pod_uid})})
    _ask(draft, asked, pod_uid)


def fail_held(draft: Draft, pod_uid: str, problem: Problem) -> None:
    """A member that could not be told to end its loan is not asked."""
    asked = next((each for each in draft.state.rounds.values() if pod_uid in each.held), None)
    if asked is not None and pod_uid not in _ending_loans(draft):
        _note(draft, asked.id, pod_uid, problem)


def _absent(message: str, pod_name: str = "") -> Problem:
    return Problem(code=ProblemCode.MEMBER_ABSENT, message=message, member=pod_name)


def _require_rest(draft: Draft, verb: Verb) -> None:
    state = draft.state
    refit = state.active or state.queued
    if refit is not None or state.reading or state.roster is None:
        phase = refit.phase.value if refit else "Pending"
        raise ProblemError(ProblemCode.WRONG_STATE, f"{ACTS[verb]} in phase {phase}; wait for the end of the refit")
    other = next((each for each in state.rounds.values() if each.waiting), None)
    if verb is not Verb.RESET_CACHE and other is not None:
        raise ProblemError(
            ProblemCode.WRONG_STATE, f"{ACTS[verb]} while the fleet is asked to {other.verb.value}; try again"
        )


def note_round_answer(draft: Draft, call: PendingCall, answer: BaseModel) -> None:
    """One engine has answered a round; what it says of itself is known from now on."""
    if isinstance(answer, WorkerReport):
        accept_report(draft, call.pod_uid, answer, call.number)
        poll_member_again(draft, call.pod_uid)  # the answer to a poll under way may be older
    _note(draft, call.round_id, call.pod_uid, answer)


def note_round_failure(draft: Draft, call: PendingCall, problem: Problem) -> None:
    """One engine refused a round or did not answer."""
    _note(draft, call.round_id, call.pod_uid, problem)


def _note(draft: Draft, round_id: str, pod_uid: str, answer: BaseModel) -> None:
    known = draft.state.rounds.get(round_id)
    if known is None:
        return
    record = draft.state.members.get(pod_uid)
    name = record.pod_name if record else pod_uid
    changed = replace(
        known,
        waiting=known.waiting - {pod_uid},
        held=known.held - {pod_uid},
        answers={**known.answers, name: answer},
    )
    draft.change(rounds={**draft.state.rounds, known.id: changed})


def forget_round(draft: Draft, round_id: str) -> None:
    """The outcome has been handed over."""
    draft.change(rounds={key: known for key, known in draft.state.rounds.items() if key != round_id})
