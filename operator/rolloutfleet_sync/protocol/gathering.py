"""The ledger of a refit's attempt: who is waited for, for how long, and who takes part.

Every engine of the roster is waited for; once ``minReady`` of them are there, the others get ``absentSeconds`` more, and are left behind
then. Nobody waits for an engine that was left behind before and is still not up, for one that is about to go, or for one that sleeps. An
attempt that follows another one takes the survivors of that one and nobody else: a member that comes back meanwhile is late.
"""

from collections.abc import Mapping

from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.trainer import LostMember
from rolloutfleet.contract.worker import WakeTag, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.forming import form_group
from rolloutfleet_sync.protocol.ledger import name_some
from rolloutfleet_sync.protocol.members import WHOLE, is_member_busy, sleeps_lightly
from rolloutfleet_sync.protocol.model import MemberRecord, State, Step
from rolloutfleet_sync.protocol.outcome import abort_refit, describe_shortage
from rolloutfleet_sync.protocol.rolling import choose_wave, takes_wave

GATHERABLE = frozenset({WorkerState.SERVING, WorkerState.PAUSED, WorkerState.DIRTY})
NEVER = float("inf")


def has_reported(draft: Draft, record: MemberRecord) -> bool:
    """Whether the member has said how it is since the attempt began, and nothing is under way that could change it."""
    return (
        record.failure is None
        and not record.abort_owed
        and not is_member_busy(draft.state, record)
        and record.report is not None
        and not record.report.lending
        and record.reported_by >= draft.refit.first_call
    )


def is_gathered(draft: Draft, record: MemberRecord) -> bool:
    """Whether the member has reported since the attempt began and can take part."""
    return has_reported(draft, record) and record.report is not None and is_gatherable(record.report)


def is_gatherable(report: WorkerReport) -> bool:
    """Whether weights can be given to this engine: it is up, and they are on the device."""
    return report.state in GATHERABLE or (report.state is WorkerState.ASLEEP and not has_lost_weights(report))


def has_lost_weights(report: WorkerReport) -> bool:
    """Whether a sleeping engine has no weights on its device."""
    return not report.asleep or WakeTag.WEIGHTS in report.asleep


def gather_member(draft: Draft, pod_uid: str) -> None:
    """Take one member's report into the ledger."""
    record, refit = draft.state.members.get(pod_uid), draft.refit
    if record is None:
        return
    if pod_uid in refit.waiting and is_gathered(draft, record):
        draft.change_refit(waiting=refit.waiting - {pod_uid})
    waited = (draft.state.members[uid] for uid in draft.refit.waiting if uid in draft.state.members)
    wave = takes_wave(draft.state, refit)
    if draft.now < refit.close_at < NEVER and any(_is_awaited(draft, other, wave=wave) for other in waited):
        return  # spares a look at everybody for each report of a large fleet
    gather(draft)


def close_when_waited(draft: Draft) -> None:
    """Close the ledger without those that have been waited for long enough."""
    active = draft.state.active
    if active is not None and active.close_at <= draft.now:
        gather(draft)


def gather(draft: Draft) -> None:
    """Look who is in the ledger, and close it when nobody is waited for any more; the refit ends when that cannot come about."""
    if draft.state.active is None or draft.refit.step is not Step.GATHER:
        return
    _drop_changed_survivors(draft)
    roster = draft.state.roster
    if draft.state.active is None or roster is None or not roster.members:
        return
    candidates = _candidates(draft)
    present = {uid: record for uid, record in candidates.items() if is_gathered(draft, record)}
    absent = {uid: record for uid, record in candidates.items() if uid not in present}
    draft.change_refit(waiting=frozenset(absent))
    missing = roster.missing if draft.refit.survivors is None else ()
    if draft.refit.repair and not candidates:
        message = f"every engine that answers holds version {draft.refit.version} already; there is nothing to repair"
        abort_refit(draft, ProblemCode.WRONG_STATE, message)
        return
    if len(present) < draft.state.least_members(draft.refit):
        draft.change_refit(close_at=NEVER)
        _fail_for_sleepers(draft, absent)
        return
    if takes_wave(draft.state, draft.refit):
        _gather_wave(draft, present, absent)
        return
    hopeful = [record for record in absent.values() if not _is_excused(draft, record)]
    hopeful_engines = [engine for engine in missing if engine not in draft.state.left_behind]
    if _needs_everybody(draft.state):
        if absent or missing:
            _fail_for_sleepers(draft, absent)
            return
    elif hopeful or hopeful_engines:
        if draft.refit.close_at == NEVER:
            draft.change_refit(close_at=_end_of_patience(draft))
        if draft.now < draft.refit.close_at:
            return
    _close(draft, present)


def _end_of_patience(draft: Draft) -> float:
    """When the ledger closes without the absent: early enough that those who are there can still form their group in time."""
    deadlines = draft.state.policy.deadlines
    return min(draft.now + deadlines.absent_seconds, draft.refit.deadline - deadlines.forming_seconds / 2)


def _gather_wave(draft: Draft, present: Mapping[str, MemberRecord], absent: Mapping[str, MemberRecord]) -> None:
    """Close the ledger over the first wave once all that answered lately have; until then, or for engines out of service, for a while."""
    if draft.refit.close_at == NEVER:
        draft.change_refit(close_at=_end_of_patience(draft))
    patient = draft.now < draft.refit.close_at
    wave = choose_wave(draft.state, present, patient=patient)
    if wave and not (patient and any(_is_awaited(draft, record, wave=True) for record in absent.values())):
        _close(draft, wave)


def _is_awaited(draft: Draft, record: MemberRecord, *, wave: bool) -> bool:
    """Whether it is worth waiting for this member; a wave is chosen among those that have answered lately."""
    return record.failure is None and record.report is not None if wave else not _is_excused(draft, record)


def _candidates(draft: Draft) -> dict[str, MemberRecord]:
    """Those that may take part: of the roster, without pods that are about to go where the others are enough."""
    survivors = draft.refit.survivors
    all_of_them = {uid: record for uid, record in draft.state.members.items() if survivors is None or uid in survivors}
    if draft.refit.repair:
        all_of_them = {uid: record for uid, record in all_of_them.items() if not _holds_version(draft, record)}
    staying = {uid: record for uid, record in all_of_them.items() if not record.leaving}
    return staying if len(staying) >= draft.state.least_members(draft.refit) else all_of_them


def _holds_version(draft: Draft, record: MemberRecord) -> bool:
    """Whether the member has said since the attempt began that it holds the committed version whole."""
    report = record.report
    whole = report is not None and (report.state in WHOLE or sleeps_lightly(report))
    return has_reported(draft, record) and whole and report is not None and report.version == draft.state.version


def _needs_everybody(state: State) -> bool:
    """Whether the trainer has fixed the size of the group."""
    return state.session is not None and state.session.request.world_size is not None


def _is_excused(draft: Draft, record: MemberRecord) -> bool:
    """Whether waiting for this member would be in vain: it sleeps, or was left behind and is still not up."""
    report = record.report
    if has_reported(draft, record) and report is not None and report.state is WorkerState.ASLEEP:
        return True
    up = record.failure is None and report is not None and is_gatherable(report)
    return record.member.engine in draft.state.left_behind and not up


def _drop_changed_survivors(draft: Draft) -> None:
    """Whoever of the survivors left, restarted or failed since is lost too."""
    survivors = draft.refit.survivors
    if survivors is None:
        return
    gone: dict[str, str] = {}
    for uid, instance in survivors.items():
        record = draft.state.members.get(uid)
        if record is None:
            gone[uid] = "left the fleet"
        elif record.report is not None and record.report.instance != instance:
            gone[uid] = "restarted"
        elif record.report is not None and record.report.state is WorkerState.FAILED:
            gone[uid] = f"failed: {record.report.message or 'no reason'}"
    if not gone:
        return
    refit = draft.refit
    before = refit.ended[-1]
    names = {uid: _name(draft.state, uid) for uid in gone}
    lost = tuple(
        LostMember(
            pod_name=names[uid],
            phase=refit.phase.value,
            code=ProblemCode.MEMBER_ABSENT,
            message=f"{names[uid]} {why} while the group formed again",
        )
        for uid, why in sorted(gone.items())
    )
    left = {uid: instance for uid, instance in survivors.items() if uid not in gone}
    ended = (*refit.ended[:-1], before.model_copy(update={"lost": (*before.lost, *lost)}))
    draft.change_refit(survivors=left, ended=ended)
    least = draft.state.least_members(draft.refit)
    if len(left) < least:
        abort_refit(draft, lost[0].code, f"{lost[0].message}{describe_shortage(len(left), least)}", lost[0].pod_name)


def _name(state: State, pod_uid: str) -> str:
    record = state.members.get(pod_uid)
    return record.pod_name if record is not None else f"pod {pod_uid}"


def _fail_for_sleepers(draft: Draft, absent: Mapping[str, MemberRecord]) -> None:
    """End the refit when everybody has reported and only sleepers are waited for: no deadline wakes them."""
    if not absent or not all(
        has_reported(draft, record) and record.report is not None and record.report.state is WorkerState.ASLEEP
        for record in absent.values()
    ):
        return
    names = [record.pod_name for record in absent.values()]
    abort_refit(
        draft,
        ProblemCode.WRONG_STATE,
        f"{name_some(names)} {'sleeps' if len(names) == 1 else 'sleep'}: wake the fleet first, "
        f"at least its tag {WakeTag.WEIGHTS}, with POST wake or Fleet.wake()",
        names[0] if len(names) == 1 else "",
    )


def _close(draft: Draft, present: Mapping[str, MemberRecord]) -> None:
    """Open the barrier for those who are there; the others are left behind."""
    roster = draft.state.roster
    if roster is None:
        raise AssertionError("a ledger is closed over a roster")
    seated = {record.member.engine for record in present.values()}
    behind = {member.engine for member in roster.members} | set(roster.missing)
    if not draft.refit.repair:  # which leaves nobody behind but those who need none
        draft.change(left_behind=frozenset(behind - seated))
    draft.change_refit(waiting=frozenset(), close_at=NEVER)
    if draft.refit.survivors is None and not takes_wave(draft.state, draft.refit):
        draft.change_refit(absent=draft.state.left_behind)
    form_group(draft, present)
