"""A version's way through a fleet in waves, where ``refit.strategy`` is Rolling.

A refit's group is the first wave, of at most ``maxUnavailable`` engines; its commit publishes the version. The others are stale from then
on, serve (:mod:`~rolloutfleet_sync.protocol.staleness`), and borrow the version from those that hold it, each of which lends next
(:mod:`~rolloutfleet_sync.protocol.latejoin`). Nobody drives the roll: every call to an engine follows from what engines say of themselves,
so a sync job that starts in the middle of one goes on with it.

A refit that is asked for waits until the roll is over, so that
no more than two versions serve; an engine whose borrowing fails, and one whose time is over, hold nobody up.
"""

from collections.abc import Mapping

from rolloutfleet.contract.worker import Admit, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.members import is_admitted, is_member_busy
from rolloutfleet_sync.protocol.model import MemberRecord, Refit, State, Verb
from rolloutfleet_sync.protocol.staleness import (
    announced_seconds,
    count_unavailable,
    is_stale,
    known_end,
    rolls,
    serves,
)


def takes_wave(state: State, refit: Refit) -> bool:
    """Whether this refit's group is a wave: adapters, and trainers that have fixed the world size, go to all engines at once."""
    fixed = state.session is not None and state.session.request.world_size is not None
    return rolls(state) and refit.adapter is None and not refit.repair and not fixed


def is_under_way(state: State, now: float) -> bool:
    """Whether the newest version is on its way through the fleet, so that the next has to wait: no longer than engines may be stale."""
    end = known_end(state, state.version - 1)
    if not rolls(state) or (end is not None and now >= end):
        return False
    if any(loan.donor for loan in state.loans.values()):
        return True
    members = state.members.values()
    return any(_comes_back(state, record) for record in members) or (
        any(is_admitted(record, state.version) for record in members)
        and any(is_stale(state, record) and not _has_failed(state, record) for record in members)
    )


def _comes_back(state: State, record: MemberRecord) -> bool:
    """Whether the engine holds the newest version and only has to be told."""
    report = record.report
    return (
        record.failure is None
        and report is not None
        and (report.state is WorkerState.RECEIVED or report.staged)
        and report.version_in_flight == state.version
    )


def _has_failed(state: State, record: MemberRecord) -> bool:
    loan = state.loans.get(record.member.pod_uid)
    return loan is not None and loan.version == state.version and bool(loan.problem)


def choose_wave(state: State, present: Mapping[str, MemberRecord], *, patient: bool) -> dict[str, MemberRecord]:
    """Those of the present that the trainer sends to; empty where it has to wait for engines to come back, which ``patient`` allows.

    Engines that serve come first, those of the kept group before others, while ``maxUnavailable`` leaves room for them. Where it does not,
    those that are out of service anyway are refitted.
    """
    size = state.policy.rolling.max_unavailable
    kept = {seat.pod_uid for seat in state.group.seats} if state.group is not None else set()
    ordered = sorted(present, key=lambda uid: (uid not in kept, present[uid].member.engine))
    serving = [uid for uid in ordered if serves(present[uid])]
    resting = [uid for uid in ordered if uid not in serving]
    wave = serving[: max(size - count_unavailable(state), 0)] or resting[:size]
    if not wave and not patient:
        wave = serving[:1]
    return {uid: present[uid] for uid in wave}


def reserves(state: State, refit: Refit) -> dict[str, str]:
    """Instances by pod uid of those outside the group who may take the place of members that an attempt has lost."""
    if not takes_wave(state, refit):
        return {}
    seated = {seat.pod_uid for seat in refit.seats}
    lost = {member.pod_name for attempt in refit.ended for member in attempt.lost}
    return {
        uid: record.report.instance
        for uid, record in state.members.items()
        if uid not in seated and record.pod_name not in lost and record.failure is None and record.report is not None
    }


def announce(draft: Draft) -> None:
    """Tell those outside the group that a newer version comes, and for how long they may serve the present one at most.

    Should the sync job vanish right after the commit, they do not serve what is old for ever. When the refit has ended they are told
    what has come of it.
    """
    refit, state = draft.refit, draft.state
    if not takes_wave(state, refit):
        return
    seconds = state.policy.rolling.max_stale_seconds + announced_seconds(state)
    seated = {seat.pod_uid for seat in refit.seats}
    for uid, record in sorted(state.members.items()):
        if uid in seated or record.report is None or not serves(record) or is_member_busy(draft.state, record):
            continue
        if record.call is not None:
            draft.cancel_calls({record.call})
        header = draft.header(uid, record.report.instance)
        message = Admit(**header, version=state.version, stale_seconds=seconds)
        draft.change_member(uid, call=draft.call(record, Verb.ADMIT, message, state.timing.call))
