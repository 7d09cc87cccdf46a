"""What trainers are shown of a state; what goes into the WeightSync's status is in :mod:`~rolloutfleet_sync.protocol.summary`."""

from rolloutfleet.contract.addresses import generation_base
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import (
    CacheResetView,
    FleetView,
    MemberView,
    Phase,
    RefitResult,
    RefitView,
    SessionView,
    TrainerJoin,
    TrainerPrepare,
    TrainerSend,
)
from rolloutfleet.contract.worker import CacheReport, WakeTag, WorkerState
from rolloutfleet_sync.protocol.ledger import TRAINER, name_some, world_size
from rolloutfleet_sync.protocol.members import hold_reason, is_admitted, sleeps_lightly
from rolloutfleet_sync.protocol.model import MemberRecord, Refit, State, Step
from rolloutfleet_sync.protocol.sessions import find_refit, require_known, require_session
from rolloutfleet_sync.protocol.staleness import is_allowed_stale
from rolloutfleet_sync.protocol.verification import combine_sent_digests, describe_detours, layout_digests


def phase_of(state: State) -> Phase:
    """The refit's phase while one runs, else Ready, or Pending while the sync job does not know how things stand."""
    if state.active is not None:
        return state.active.phase
    if state.roster is None or state.record is None or state.reading:
        return Phase.PENDING
    return Phase.READY


def view_fleet(state: State) -> FleetView:
    """The fleet as trainers see it; ProblemError while its roster and version are unknown."""
    require_known(state)
    records = sorted(state.members.values(), key=lambda record: record.member.engine)
    return FleetView(
        fleet=state.identity.fleet,
        namespace=state.identity.namespace,
        fleet_uid=state.identity.fleet_uid,
        model=state.identity.model,
        phase=phase_of(state),
        epoch=state.epoch,
        version=state.version,
        held=hold_reason(state),
        transport=state.policy.transport,
        engines=state.roster.engines if state.roster else 0,
        members=tuple(_view_member(state, record) for record in records),
        endpoints=tuple(generation_base(record.member.address) for record in records if _is_ready(state, record)),
    )


def _is_ready(state: State, record: MemberRecord) -> bool:
    if record.report is not None and record.report.held:
        return False
    current = is_admitted(record, state.version)
    return (current and record.report is not None and record.report.state is WorkerState.SERVING) or (
        is_allowed_stale(state, record)
    )


def _view_member(state: State, record: MemberRecord) -> MemberView:
    report = record.report
    return MemberView(
        engine=record.member.engine,
        pod_name=record.pod_name,
        address=record.member.address,
        ready=_is_ready(state, record),
        state=report.state if report else WorkerState.STARTING,
        version=report.version if report else 0,
        ranks=record.member.ranks,
        epoch=report.epoch if report else 0,
        adapters=report.adapters if report else {},
        message=describe_member(state, record),
    )


def describe_member(state: State, record: MemberRecord) -> str:
    """Why a member is not ready, empty when it is; the same words as long as the reason is the same."""
    parts = (
        _describe_state(record),
        _describe_staleness(state, record),
        "" if is_admitted(record, state.version) else _describe_loan(state, record),
    )
    return "; ".join(part for part in parts if part)


def _describe_staleness(state: State, record: MemberRecord) -> str:
    if record.report is None or not is_allowed_stale(state, record):
        return ""
    return f"serves version {record.report.version} until it has taken version {state.version} over"


def _describe_loan(state: State, record: MemberRecord) -> str:
    loan = state.loans.get(record.member.pod_uid)
    if loan is None or loan.version != state.version:
        return ""
    if not loan.donor:
        return loan.problem
    donor = state.members.get(loan.donor)
    return f"takes version {loan.version} over from {donor.pod_name if donor else 'a peer'}"


def _describe_state(record: MemberRecord) -> str:
    report = record.report
    if not record.member.address:
        return "has no address yet"
    if record.failure is not None:
        return record.failure.message
    if report is None:
        return "has not answered yet"
    if report.state is WorkerState.ASLEEP:
        if report.asleep and WakeTag.WEIGHTS not in report.asleep:
            return f"sleeps at level {report.sleep_level} in part: {', '.join(report.asleep)} is off its device"
        rest = "" if sleeps_lightly(report) else ", and holds no weights until it is woken and refitted"
        return f"sleeps at level {report.sleep_level}{rest}"
    if report.message:
        return report.message
    return "" if report.state is WorkerState.SERVING else f"is {report.state.value}"


def view_session(state: State, session: str) -> SessionView:
    """Raises ProblemError when the session is lost."""
    held = require_session(state, session)
    return SessionView(session=held.id, lease_seconds=state.timing.lease, fleet=view_fleet(state))


def view_cache_reset(state: State, round_id: str) -> CacheResetView | None:
    """vLLM's answers by pod name; None while some are missing."""
    known = state.rounds[round_id]
    if known.waiting:
        return None
    answers = sorted(known.answers.items())
    return CacheResetView(reset={name: isinstance(said, CacheReport) and said.cache_reset for name, said in answers})


def view_rest(state: State, round_id: str) -> FleetView | None:
    """The fleet after every engine fell asleep or woke, None while answers are missing; ProblemError naming who did not."""
    known = state.rounds[round_id]
    if known.waiting:
        return None
    problems = {name: said for name, said in sorted(known.answers.items()) if isinstance(said, Problem)}
    if not problems:
        return view_fleet(state)
    alone = len(problems) == 1
    sentences = "; ".join(problem.message for problem in list(problems.values())[:8])
    raise ProblemError(
        next(iter(problems.values())).code if alone else ProblemCode.ENGINE_FAILED,
        f"{name_some(problems)} of {len(known.answers)} engines did not {known.verb.value}: {sentences}; "
        f"the others did, repeat the call",
        member=next(iter(problems.values())).member if alone else "",
    )


def view_refit(state: State, refit: str, now: float) -> RefitView:
    """Raises ProblemError when the refit is unknown."""
    known = find_refit(state, refit)
    remaining = max(known.deadline - now, 0.001)
    join = prepare = send = None
    if known.step is Step.JOIN and known.choice is not None:
        join = TrainerJoin(
            epoch=known.epoch,
            transport=known.choice.transport,
            wire=known.choice.wire,
            trainer_ranks=known.trainer_ranks,
            world_size=world_size(known.seats, known.trainer_ranks),
            deadline_seconds=remaining,
        )
    if known.step is Step.PREPARE:
        prepare = TrainerPrepare(epoch=known.epoch, layouts=layout_digests(known), deadline_seconds=remaining)
    if known.trainer_pending and known.step in {Step.RECEIVE, Step.VERIFY}:  # nothing to receive is there at once
        send = TrainerSend(epoch=known.epoch, deadline_seconds=remaining)
    return RefitView(
        refit=known.id,
        version=known.version,
        epoch=known.epoch,
        phase=known.phase,
        attempt=known.attempt,
        sequence=known.sequence,
        waiting_for=tuple(waiting_for(state, known)),
        join=join,
        prepare=prepare,
        send=send,
        problem=known.problem,
        result=summarize_result(known) if known.committed and known.manifest is None else None,
    )


def waiting_for(state: State, refit: Refit) -> list[str]:
    """Pod names, ``trainer`` and engines without a pod whose answer the refit's step still needs, sorted."""
    seated = {seat.pod_uid: seat.pod_name for seat in refit.seats}
    waiting = [seated.get(uid) or _name(state, uid) for uid in refit.waiting]
    if refit.trainer_pending:
        waiting.append(TRAINER)
    if refit.step is Step.GATHER and state.roster is not None:
        present = {member.engine for member in state.roster.members}
        waiting += [f"engine-{engine}" for engine in range(state.roster.engines) if engine not in present]
    return sorted(waiting)


def _name(state: State, pod_uid: str) -> str:
    record = state.members.get(pod_uid)
    return record.pod_name if record else pod_uid


def summarize_result(refit: Refit) -> RefitResult:
    """What a committed refit achieved; its members are those that serve the version."""
    transfer = refit.seconds.get(Phase.TRANSFERRING.value, 0.0)
    choice = refit.choice
    return RefitResult(
        version=refit.version,
        epoch=refit.epoch,
        members=tuple(seat.pod_name for seat in refit.seats if seat.pod_uid not in refit.casualties),
        tensors=refit.tensors,
        nbytes=refit.nbytes,
        digest=combine_sent_digests(refit.sent.digests) if refit.sent else "",
        live_digest=refit.live_digest,
        seconds=dict(refit.seconds),
        pause_seconds=refit.pause_seconds,
        gigabytes_per_second=refit.nbytes / transfer / 1e9 if transfer > 0 else 0.0,
        transport=choice.transport if choice else Transport.AUTO,
        reason=choice.reason if choice else "",
        staged=refit.staged,
        detours=describe_detours(refit),
        slowest=refit.slowest,
        attempts=refit.ended,
    )
