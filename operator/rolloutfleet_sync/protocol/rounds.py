"""Wishes of a trainer that go to every engine at once, outside refits: reset the prefix cache, sleep, wake."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import SleepFleet, WakeFleet
from rolloutfleet.contract.worker import Call, ResetCache, Sleep, Wake, WorkerReport
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.latejoin import end_loans
from rolloutfleet_sync.protocol.members import accept_report, poll_member_again
from rolloutfleet_sync.protocol.model import PendingCall, Round, Verb

ACTS = {
    Verb.RESET_CACHE: "prefix caches are not reset",
    Verb.SLEEP: "engines do not sleep",
    Verb.WAKE: "engines do not wake",
}


def reset_caches(draft: Draft, round_id: str) -> None:
    """Ask every engine to drop its prefix cache; ProblemError while a refit is under way."""
    _begin(draft, round_id, Verb.RESET_CACHE, lambda header: ResetCache(**header), draft.state.timing.call)


def sleep_fleet(draft: Draft, round_id: str, wish: SleepFleet) -> None:
    """Ask every engine to sleep; ProblemError while a refit is under way. Loans end, and buffers for staging are gone."""
    seconds = draft.state.timing.sleeping
    _begin(draft, round_id, Verb.SLEEP, lambda h: Sleep(**h, level=wish.level, deadline_seconds=seconds), seconds)


def wake_fleet(draft: Draft, round_id: str, wish: WakeFleet) -> None:
    """Ask every engine to take back what the tags name, or everything; ProblemError while a refit is under way."""
    seconds = draft.state.timing.sleeping
    _begin(draft, round_id, Verb.WAKE, lambda h: Wake(**h, tags=wish.tags, deadline_seconds=seconds), seconds)


def _begin(draft: Draft, round_id: str, verb: Verb, message: Callable[[dict[str, Any]], Call], seconds: float) -> None:
    _require_rest(draft, verb)
    if verb is not Verb.RESET_CACHE:
        end_loans(draft, "the fleet is about to sleep or wake")
        group = draft.state.group
        draft.change(group=replace(group, prepared=None) if group is not None else None)
    state = draft.state
    present = {member.engine for member in state.roster.members} if state.roster else set()
    engines = state.roster.engines if state.roster else 0
    absent = {
        f"engine-{engine}": _absent(f"engine {engine} has no pod") for engine in range(engines) if engine not in present
    }
    reports = {uid: record.report for uid, record in state.members.items() if record.report and record.member.address}
    absent |= {
        record.pod_name: _absent(f"{record.pod_name} has not answered yet", record.pod_name)
        for uid, record in state.members.items()
        if uid not in reports
    }
    draft.change(rounds={**state.rounds, round_id: Round(round_id, verb, frozenset(reports), absent)})
    for uid, report in reports.items():
        call = message(draft.header(uid, report.instance))
        draft.call(state.members[uid], verb, call, seconds, round_id=round_id)


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
    _note(draft, call, answer)


def note_round_failure(draft: Draft, call: PendingCall, problem: Problem) -> None:
    """One engine refused a round or did not answer."""
    _note(draft, call, problem)


def _note(draft: Draft, call: PendingCall, answer: BaseModel) -> None:
    known = draft.state.rounds.get(call.round_id)
    if known is None:
        return
    record = draft.state.members.get(call.pod_uid)
    name = record.pod_name if record else call.pod_uid
    changed = replace(known, waiting=known.waiting - {call.pod_uid}, answers={**known.answers, name: answer})
    draft.change(rounds={**draft.state.rounds, known.id: changed})


def forget_round(draft: Draft, round_id: str) -> None:
    """The outcome has been handed over."""
    draft.change(rounds={key: known for key, known in draft.state.rounds.items() if key != round_id})
