"""The beginning of a refit's attempt: from the ledger to a group in which all are ready for the bytes. In the first one every engine
serves meanwhile.

:mod:`~rolloutfleet_sync.protocol.gathering` says who takes part; they ``check`` the manifest -> the transport is chosen -> they ``join``
the group -> they ``prepare``. A kept group with the same members goes straight to the intent when it has prepared for this manifest,
these layouts and this way of staging before.
"""

from collections.abc import Mapping
from dataclasses import replace

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import (
    Check,
    CheckReport,
    Join,
    JoinReport,
    Prepare,
    WorkerReport,
)
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.fanout import fan_out, remaining_seconds, seat_header
from rolloutfleet_sync.protocol.latejoin import end_loans
from rolloutfleet_sync.protocol.ledger import (
    describe_faults,
    find_environment_mismatch,
    find_lacking_base,
    find_ledger_mismatch,
    plan_seats,
    world_size,
)
from rolloutfleet_sync.protocol.members import poll_again
from rolloutfleet_sync.protocol.model import Choice, Group, MemberRecord, Preparation, Refit, Session, Step, Verb
from rolloutfleet_sync.protocol.outcome import abort_refit, enter_phase, fail_queued, lose_seats
from rolloutfleet_sync.protocol.refit import write_intent
from rolloutfleet_sync.protocol.rolling import is_under_way
from rolloutfleet_sync.protocol.transport import Parties, choose_adapter_transport, choose_transport
from rolloutfleet_sync.protocol.verification import layout_digests

KEPT_MANIFESTS = 2
KEPT_ADAPTERS = 64
"""How many of each kind every rank remembers, by when it was last used."""


def start_queued_refit(draft: Draft) -> None:
    """Begin the refit that waits, once nothing else is under way."""
    state = draft.state
    queued = state.queued
    if queued is None or state.active is not None or state.reading or any(r.waiting for r in state.rounds.values()):
        return
    if is_under_way(state, draft.now) and state.session is not None and state.session.id == queued.session:
        return
    if state.session is None or state.session.id != queued.session:
        fail_queued(draft, queued, ProblemCode.SESSION_LOST, f"the session of trainer {queued.trainer} has ended")
        return
    stale = find_stale_version(queued.version, state.version, repair=queued.repair)
    if stale:
        fail_queued(draft, queued, ProblemCode.STALE_VERSION, stale)
        return
    end_loans(draft, f"refit of version {queued.version} begins")
    draft.change(refit=replace(queued, started=draft.now, first_call=draft.state.next_id), queued=None)
    enter_phase(draft, Phase.FORMING, Step.GATHER, state.policy.deadlines.forming_seconds)
    poll_again(draft)
    draft.change_refit(waiting=frozenset(draft.state.members))


def find_stale_version(asked: int, committed: int, *, repair: bool) -> str:
    """Why a version is refused; empty when it is not."""
    if repair:
        return "" if asked == committed else f"a repair brings the committed version, {committed}, not version {asked}"
    return (
        ""
        if asked > committed
        else f"version {asked} is not above the committed version {committed}; send {committed + 1} or higher"
    )


def form_group(draft: Draft, present: Mapping[str, MemberRecord]) -> None:
    """Seat these members, and go on with them if all lines fit together."""
    state, refit = draft.state, draft.refit
    session = _session(draft)
    reports = {uid: record.report for uid, record in present.items() if record.report is not None}
    ranks = session.request.ranks
    members = [record.member for record in present.values()]
    seats = plan_seats(members, {uid: report.instance for uid, report in reports.items()}, ranks)
    draft.change_refit(seats=seats, trainer_ranks=ranks)
    problem = find_ledger_mismatch(seats, reports, session.request)
    if problem is not None:
        abort_refit(draft, problem.code, problem.message, problem.member)
        return
    problem = find_lacking_base(refit, seats, reports, state.version)
    if problem is not None:
        abort_refit(draft, problem.code, problem.message, problem.member)
        return
    group = state.group
    if group is not None and (group.session != session.id or group.seats != seats):
        group = None
    draft.change(group=group)
    known = group.layouts.get(refit.manifest_digest) if group is not None else None
    if known is not None:
        draft.change_refit(layouts=known)
        _choose(draft)
        return
    if refit.manifest is None:
        raise AssertionError(f"refit {refit.id} has ended")
    manifest, epoch = refit.manifest, draft.state.epoch
    draft.change_refit(step=Step.CHECK)
    seconds = remaining_seconds(draft)
    fan_out(
        draft,
        Verb.CHECK,
        lambda seat: Check(
            **seat_header(draft, seat, epoch), manifest=manifest, adapter=refit.adapter, deadline_seconds=seconds
        ),
    )


def _session(draft: Draft) -> Session:
    if draft.state.session is None:
        raise AssertionError("a refit without a session is aborted before it goes on")
    return draft.state.session


def _reports(draft: Draft) -> dict[str, WorkerReport]:
    return {uid: record.report for uid, record in draft.state.members.items() if record.report is not None}


def note_check(draft: Draft, pod_uid: str, report: CheckReport) -> None:
    """One member has looked at the manifest; faults are collected from all before the refit fails."""
    refit = draft.refit
    faults = {**refit.faults, pod_uid: report.faults} if report.faults else refit.faults
    layouts = {**refit.layouts, pod_uid: report.layouts} if report.layouts else refit.layouts
    draft.change_refit(waiting=refit.waiting - {pod_uid}, faults=faults, layouts=layouts)
    if draft.refit.waiting:
        return
    if faults:
        problem = describe_faults(refit.version, faults, refit.seats)
        abort_refit(draft, problem.code, problem.message, problem.member)
        return
    _choose(draft)


def _choose(draft: Draft) -> None:
    """Settle how the weights travel; a group of another wire ends, another manifest joins the kept one."""
    refit, session, reports = draft.refit, _session(draft), _reports(draft)
    parties = Parties(session.request, refit.seats, reports, refit.layouts)
    group = draft.state.group
    prepared = group.prepared if group is not None else None
    holds_staging = prepared is not None and prepared.staged and prepared.manifest_digest == refit.manifest_digest
    if refit.adapter is not None:
        choice = choose_adapter_transport(draft.state.policy, parties)
    else:
        choice = choose_transport(draft.state.policy, parties, holds_staging=holds_staging)
    problem = (
        choice
        if isinstance(choice, Problem)
        else find_environment_mismatch(refit.seats, reports, session.request, choice.wire)
    )
    if problem is not None or isinstance(choice, Problem):
        if problem is not None:
            abort_refit(draft, problem.code, problem.message, problem.member)
        return
    draft.change_refit(choice=choice)
    if group is not None and (group.transport, group.wire) != (choice.transport, choice.wire):
        group = None
    if group is None:
        _join(draft, session, choice)
        return
    draft.change(group=_with_layouts(group, draft.refit))
    draft.change_refit(epoch=group.epoch)
    _prepare(draft)


def _with_layouts(group: Group, refit: Refit) -> Group:
    """The group with this manifest as the one used last; what workers have forgotten for its sake has to be checked again."""
    key, is_adapter = refit.manifest_digest, refit.adapter is not None
    layouts = {digest: known for digest, known in group.layouts.items() if digest != key} | {key: refit.layouts}
    adapters = group.adapters | {key} if is_adapter else group.adapters
    alike = [digest for digest in layouts if (digest in adapters) == is_adapter]
    for forgotten in alike[: -(KEPT_ADAPTERS if is_adapter else KEPT_MANIFESTS)]:
        del layouts[forgotten]
    return replace(group, layouts=layouts, adapters=adapters.intersection(layouts))


def _join(draft: Draft, session: Session, choice: Choice) -> None:
    epoch = draft.raise_epoch()
    draft.change_refit(epoch=epoch, step=Step.JOIN, trainer_pending=True)
    refit = draft.refit
    size = world_size(refit.seats, refit.trainer_ranks)
    seconds = remaining_seconds(draft)
    fan_out(
        draft,
        Verb.JOIN,
        lambda seat: Join(
            **seat_header(draft, seat),
            transport=choice.transport,
            wire=choice.wire,
            rendezvous=session.request.rendezvous,
            trainer_ranks=refit.trainer_ranks,
            rank_offset=seat.offset,
            world_size=size,
            deadline_seconds=seconds,
        ),
    )


def note_join(draft: Draft, pod_uid: str, report: JoinReport) -> None:
    """One member is in the group, as the ranks that were planned for it or not at all."""
    seat = draft.refit.seat(pod_uid)
    expected = tuple(range(seat.offset, seat.offset + seat.ranks))
    if report.ranks != expected:
        message = f"{seat.pod_name} joined as ranks {list(report.ranks)}, the plan says {list(expected)}"
        lose_seats(draft, {pod_uid: (ProblemCode.ENGINE_FAILED, message)})
        return
    draft.change_member(pod_uid, abort_owed=False)
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    finish_joining(draft)


def finish_joining(draft: Draft) -> None:
    """Keep the group once every worker and the trainer are in it, and go on to the preparation."""
    state, refit = draft.state, draft.refit
    if refit.waiting or refit.trainer_pending or refit.choice is None:
        return
    group = Group(
        refit.session, refit.epoch, refit.seats, refit.trainer_ranks, refit.choice.transport, refit.choice.wire
    )
    draft.change(group=_with_layouts(group, refit))
    if state.epoch != refit.epoch:
        abort_refit(
            draft,
            ProblemCode.STALE_EPOCH,
            f"the group formed in epoch {refit.epoch}, but a worker has seen epoch {state.epoch}",
        )
        return
    _prepare(draft)


def _wanted_preparation(refit: Refit) -> Preparation:
    return Preparation(refit.manifest_digest, layout_digests(refit), refit.staged)


def _prepare(draft: Draft) -> None:
    """Have trainer and workers lay out the transfer, unless they have, or nothing is cut by layout."""
    refit, group = draft.refit, draft.state.group
    if refit.choice is None or group is None:
        raise AssertionError("what travels is settled before it is prepared")
    wanted = _wanted_preparation(refit)
    if not refit.choice.transport.by_layout or group.prepared == wanted:
        write_intent(draft)
        return
    enter_phase(draft, Phase.PREPARING, Step.PREPARE, draft.state.policy.deadlines.preparing_seconds)
    draft.change(group=replace(group, prepared=None))
    draft.change_refit(trainer_pending=True)
    seconds = remaining_seconds(draft)
    fan_out(
        draft,
        Verb.PREPARE,
        lambda seat: Prepare(
            **seat_header(draft, seat),
            manifest_digest=wanted.manifest_digest,
            layouts=wanted.layouts,
            staged=wanted.staged,
            deadline_seconds=seconds,
        ),
    )


def note_prepare(draft: Draft, pod_uid: str) -> None:
    """One member is ready for the bytes."""
    draft.change_refit(waiting=draft.refit.waiting - {pod_uid})
    finish_preparing(draft)


def finish_preparing(draft: Draft) -> None:
    """Remember the preparation once every worker and the trainer are ready, and go on to the intent."""
    refit, group = draft.refit, draft.state.group
    if refit.waiting or refit.trainer_pending:
        return
    if group is None:
        abort_refit(
            draft,
            ProblemCode.STALE_EPOCH,
            f"the group of epoch {refit.epoch} ended while it prepared: a worker has seen epoch {draft.state.epoch}",
        )
        return
    draft.change(group=replace(group, prepared=_wanted_preparation(refit)))
    write_intent(draft)
