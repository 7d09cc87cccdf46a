"""Trainers: who holds the fleet, for how long, and what they may ask of it."""

from collections.abc import Iterable
from dataclasses import replace

from rolloutfleet.contract.names import CONTRACT_VERSION
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.events import (
    RefitRequested,
    SessionOpened,
    TrainerHasFailed,
    TrainerHasJoined,
    TrainerHasPrepared,
    TrainerHasSent,
)
from rolloutfleet_sync.protocol.forming import (
    find_stale_version,
    finish_joining,
    finish_preparing,
    start_queued_refit,
)
from rolloutfleet_sync.protocol.ledger import TRAINER, find_world_mismatch
from rolloutfleet_sync.protocol.losses import lose_trainer
from rolloutfleet_sync.protocol.members import tear_down_group
from rolloutfleet_sync.protocol.model import TERMINAL, Refit, Session, State, Step
from rolloutfleet_sync.protocol.outcome import describe_standstill, fail_queued, suspect
from rolloutfleet_sync.protocol.refit import verify


def require_running(state: State) -> None:
    """Raises ProblemError while the process is ending."""
    if state.stopping:
        raise ProblemError(ProblemCode.WRONG_STATE, "the sync job is stopping; try again when its successor answers")


def require_known(state: State) -> None:
    """Raises ProblemError while roster or status have not been read for the first time."""
    if state.record is None or state.roster is None:
        what = "status" if state.record is None else "roster"
        raise ProblemError(ProblemCode.WRONG_STATE, f"the sync job has not read the fleet's {what} yet; try again")


def require_session(state: State, session: str) -> Session:
    """The session, or ProblemError that says that it is lost."""
    if state.session is None or state.session.id != session:
        holder = f"; trainer {state.session.request.trainer} holds the fleet now" if state.session else ""
        raise ProblemError(
            ProblemCode.SESSION_LOST,
            f"session {session} is not held any more: its lease of {state.timing.lease:g} s ended, it was closed or taken "
            f"over, or the sync job restarted{holder}; open a new session",
        )
    return state.session


def open_session(draft: Draft, event: SessionOpened) -> None:
    """Give the fleet to a trainer; ProblemError when another one's lease lives, or the trainer does not fit."""
    require_running(draft.state)
    require_known(draft.state)
    request = event.request
    if request.contract_version != CONTRACT_VERSION:
        raise ProblemError(
            ProblemCode.CONTRACT_MISMATCH,
            f"trainer {request.trainer} speaks contract version {request.contract_version}, the sync job "
            f"{CONTRACT_VERSION}; install the client of this release",
        )
    problem = find_world_mismatch(request, draft.state.roster) if draft.state.roster else None
    if problem is not None:
        raise ProblemError.of(problem)
    held = draft.state.session
    if held is not None and held.expires > draft.now:
        if not request.take_over:
            raise ProblemError(
                ProblemCode.SESSION_HELD,
                f"trainer {held.request.trainer} holds the fleet and its lease lasts {held.expires - draft.now:.1f} s "
                "more; wait, close its session, or open with takeOver",
                member=held.request.trainer,
            )
        end_session(draft, f"trainer {request.trainer} took over from {held.request.trainer}")
    elif held is not None:
        end_session(draft, _lease_message(draft, held))
    draft.change(session=Session(event.session, request, draft.now + draft.state.timing.lease))
    draft.publish()


def renew_session(draft: Draft, session: str) -> None:
    """Start the lease anew; ProblemError when the session is lost."""
    held = require_session(draft.state, session)
    draft.change(session=replace(held, expires=draft.now + draft.state.timing.lease))


def end_session(draft: Draft, reason: str) -> None:
    """Take the fleet from its trainer: abort what is not decided and tear the group down."""
    held = draft.state.session
    if held is None:
        return
    draft.change(session=None)
    queued = draft.state.queued
    if queued is not None and queued.session == held.id:
        fail_queued(draft, queued, ProblemCode.SESSION_LOST, reason)
    lose_trainer(draft, ProblemCode.SESSION_LOST, reason)
    if draft.state.active is None:
        tear_down_group(draft, reason)
    draft.publish()


def _lease_message(draft: Draft, session: Session) -> str:
    late, lease = draft.now - session.expires, draft.state.timing.lease
    return (
        f"the lease of trainer {session.request.trainer} ended: it made no call for {lease + late:.0f} s, its lease is {lease:g} s"
        f"{describe_standstill(late)}; see whether it was killed, hangs or was cut off from the sync job, then connect again and refit"
    )


def expire_session(draft: Draft) -> None:
    """End the session whose lease is over."""
    held = draft.state.session
    if held is not None and held.expires <= draft.now:
        end_session(draft, _lease_message(draft, held))


def drop_orphaned_group(draft: Draft) -> None:
    """A group whose trainer left while its last refit was being committed ends when that refit has."""
    group, session = draft.state.group, draft.state.session
    if group is not None and draft.state.active is None and (session is None or session.id != group.session):
        tear_down_group(draft, "its trainer has left")


def request_refit(draft: Draft, event: RefitRequested) -> None:
    """Queue a refit; it begins at once when nothing else is under way.

    A request repeated while its refit runs, as after a broken connection, changes nothing.
    """
    state = draft.state
    require_running(state)
    session = require_session(state, event.session)
    asked = event.request
    running = find_running(state, event.session, asked.version, event.digest)
    if running is not None:
        return
    stale = find_stale_version(asked.version, state.version, repair=asked.repair)
    if stale:
        raise ProblemError(ProblemCode.STALE_VERSION, stale)
    if asked.repair and (asked.adapter is not None or session.request.world_size is not None):
        what = (
            "an adapter"
            if asked.adapter is not None
            else f"a session that has fixed the world size, to {session.request.world_size}"
        )
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"a repair goes to the engines that lack the version alone, which {what} cannot do",
        )
    blocking = state.active
    if state.queued is not None or (blocking is not None and blocking.session == event.session and not blocking.final):
        other = state.queued or blocking
        raise ProblemError(
            ProblemCode.WRONG_STATE,
            f"refit {other.id if other else ''} of version {other.version if other else ''} is in phase "
            f"{other.phase.value if other else ''}; a fleet has one refit at a time, wait for its end",
        )
    manifest, adapter = asked.manifest, asked.adapter
    if adapter is not None and adapter.name == state.identity.model:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"adapter {adapter.name} has the name under which engines serve the model itself; give it another one",
        )
    draft.change(
        queued=Refit(
            id=event.refit,
            session=session.id,
            trainer=session.request.trainer,
            version=asked.version,
            manifest=manifest,
            manifest_digest=event.digest,
            tensors=len(manifest.tensors),
            nbytes=manifest.nbytes,
            adapter=adapter,
            repair=asked.repair,
            started=draft.now,
        )
    )
    start_queued_refit(draft)


def find_running(state: State, session: str, version: int, digest: str) -> Refit | None:
    """The refit of this session that has the same version and manifest and has not ended."""
    for refit in (state.queued, state.active):
        if refit is None or refit.session != session or refit.final:
            continue
        if refit.version == version and refit.manifest_digest == digest:
            return refit
    return None


def find_refit(state: State, refit: str) -> Refit:
    """The refit of this id, running, waiting or ended; ProblemError when it is unknown."""
    for known in (state.refit, state.queued, *reversed(state.finished)):
        if known is not None and known.id == refit:
            return known
    raise ProblemError(
        ProblemCode.NOT_FOUND,
        f"refit {refit} is not known: the sync job restarted since, or {len(state.finished)} newer ones have ended; "
        "ask for the fleet's version and open a new session",
    )


def _current(draft: Draft, refit: str, epoch: int) -> Refit | None:
    """The refit under way, or None when the message repeats what is already known; ProblemError when it is out of date."""
    known = find_refit(draft.state, refit)
    if known.problem is not None and not known.committed:
        raise ProblemError.of(known.problem)
    if known.epoch != epoch:
        raise ProblemError(
            ProblemCode.STALE_EPOCH, f"refit {refit} is in epoch {known.epoch}, the message is of epoch {epoch}"
        )
    return None if known.phase in TERMINAL else known


def note_trainer_joined(draft: Draft, event: TrainerHasJoined) -> None:
    """The trainer is in the group."""
    refit = _current(draft, event.refit, event.message.epoch)
    if refit is not None and refit.step is Step.JOIN and refit.trainer_pending:
        draft.change_refit(trainer_pending=False)
        finish_joining(draft)


def note_trainer_prepared(draft: Draft, event: TrainerHasPrepared) -> None:
    """Every trainer rank is ready to send."""
    refit = _current(draft, event.refit, event.message.epoch)
    if refit is not None and refit.step is Step.PREPARE and refit.trainer_pending:
        draft.change_refit(trainer_pending=False)
        finish_preparing(draft)


def note_trainer_sent(draft: Draft, event: TrainerHasSent) -> None:
    """The trainer has sent all tensors and says what each rank must hold."""
    refit = _current(draft, event.refit, event.message.epoch)
    if refit is None or refit.sent == event.message:
        return
    if refit.step not in {Step.RECEIVE, Step.VERIFY} or refit.sent is not None:
        raise ProblemError(
            ProblemCode.WRONG_STATE,
            f"refit {refit.id} is in phase {refit.phase.value} and does not wait for what the trainer sent",
        )
    draft.change_refit(sent=event.message, trainer_pending=False)
    verify(draft)


def note_trainer_failed(draft: Draft, event: TrainerHasFailed) -> None:
    """The trainer gives its refit up, or this attempt of it since it was cut off."""
    refit, said = find_refit(draft.state, event.refit), event.message
    if refit is draft.state.active and said.epoch in {refit.epoch, 0}:
        if said.peer_lost and said.epoch:
            message = f"trainer {refit.trainer} was cut off: {said.message}"
            suspect(draft, ProblemCode.PEER_LOST, message, TRAINER, _seats_of(refit, said.lost_ranks))
        else:
            lose_trainer(draft, ProblemCode.TRANSFER_FAILED, f"trainer {refit.trainer} failed: {said.message}")
    elif refit is draft.state.queued:
        fail_queued(draft, refit, ProblemCode.TRANSFER_FAILED, f"trainer {refit.trainer} gave up")


def _seats_of(refit: Refit, ranks: Iterable[int]) -> frozenset[str]:
    """Pod uids of the members that have these ranks of the group."""
    lost = frozenset(ranks)
    return frozenset(
        seat.pod_uid for seat in refit.seats if lost.intersection(range(seat.offset, seat.offset + seat.ranks))
    )
