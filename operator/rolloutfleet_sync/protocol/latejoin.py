"""Late joiners and stale engines: who lacks the committed version gets it out of a peer's memory, without the trainer.

Between refits, a member that is up, has been told the version and does not hold it borrows it from a member that serves it: ``lend`` to the
donor, which goes on serving, then ``borrow`` to the late one, in kernel format, rank from rank. Commit, resume and admission follow as the
ordinary work of :mod:`~rolloutfleet_sync.protocol.members`. A donor lends to one peer at a time, several donors lend at once. The calls
carry the current epoch, and a donor whose loan ends early is told to ``let-go``, so a kept group stays valid; the next refit re-forms it
when its members have changed. An attempt that fails is made again later, each time after a longer wait, but not with a donor whose weights
the borrower has refused for their shape; after the first failure another donor, where there is one, is asked at once. A refit or a sleep
that begins ends every loan. Without a peer the member waits for that refit.

A member that serves an older version meanwhile (:mod:`~rolloutfleet_sync.protocol.staleness`) takes the new one beside its live weights,
and swaps it in when it is told to commit; where it has no room it is taken out of service for the loan, if it may be.
"""

from collections.abc import Iterable
from dataclasses import replace

from rolloutfleet.contract.policy import LateJoin, PauseMode, Staging, Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import Borrow, Lend, LendReport, ReceiveReport, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.fanout import GRACE_SECONDS
from rolloutfleet_sync.protocol.members import (
    is_admitted,
    is_member_busy,
    is_on_loan,
    leave_alone,
    leave_epoch,
    let_go,
    poll_member_again,
)
from rolloutfleet_sync.protocol.model import Loan, MemberRecord, State, Verb
from rolloutfleet_sync.protocol.rolling import is_under_way
from rolloutfleet_sync.protocol.staleness import is_stale, may_take_out, serves

BORROWERS = frozenset({WorkerState.SERVING, WorkerState.PAUSED, WorkerState.DIRTY})
LONGEST_RETRY_SECONDS = 60.0
CPU = "cpu"


def offer_loan(draft: Draft, pod_uid: str) -> None:
    """Begin to give this member the committed version, if it lacks it and a peer can lend it now."""
    state = draft.state
    record = state.members.get(pod_uid)
    if record is None or record.report is None or not _wants_loan(draft, record):
        return
    loan = state.loans.get(pod_uid)
    if loan is None or loan.version != state.version:
        loan = Loan(state.version, record.report.instance)
    elif loan.instance != record.report.instance:
        loan = replace(loan, instance=record.report.instance, misfits=frozenset(), cannot_stage=False)
    if draft.now < loan.retry_at:
        return
    donor = _find_donor(state, record, loan)
    if donor is None or donor.report is None:
        return
    stale = is_stale(state, record)
    staged = stale and state.policy.staging is Staging.AUTO and not loan.cannot_stage and _alike(donor, record)
    if stale and not staged and not may_take_out(state, draft.now):
        return
    seconds = float(state.policy.deadlines.transferring_seconds)
    if stale and not staged:
        seconds += state.policy.deadlines.pausing_seconds
    wire = Wire.NCCL if set(donor.report.devices) - {CPU} else Wire.GLOO
    message = Lend(
        **draft.header(donor.member.pod_uid, donor.report.instance),
        version=state.version,
        wire=wire,
        deadline_seconds=seconds,
    )
    begun = replace(
        loan,
        staged=staged,
        donor=donor.member.pod_uid,
        donor_instance=donor.report.instance,
        deadline=draft.now + seconds,
        lent=None,
    )
    _change_loan(draft, pod_uid, begun)
    draft.call(donor, Verb.LEND, message, seconds + GRACE_SECONDS, borrower=pod_uid)
    draft.publish()


def offer_to_waiting(draft: Draft) -> None:
    """Begin to give the version to whoever waits for it, now that a member may have come to lend: those out of service first."""
    members = draft.state.members.items()
    for uid, record in sorted(members, key=lambda item: (serves(item[1]), item[1].member.engine)):
        if _wants_loan(draft, record):
            offer_loan(draft, uid)


def _alike(donor: MemberRecord, borrower: MemberRecord) -> bool:
    """Whether both serve the same adapters, which do not come with weights that arrive beside the live ones."""
    return (
        donor.report is not None and borrower.report is not None and donor.report.adapters == borrower.report.adapters
    )


def _wants_loan(draft: Draft, record: MemberRecord) -> bool:
    state, report = draft.state, record.report
    return (
        state.version > 0
        and state.policy.late_join is not LateJoin.WAIT
        and state.active is None
        and (state.queued is None or is_under_way(state, draft.now))
        and not state.reading
        and not state.stopping
        and not any(each.waiting for each in state.rounds.values())
        and record.failure is None
        and record.call is None
        and not record.abort_owed
        and report is not None
        and report.state in BORROWERS
        and not (report.version == state.version and report.state is not WorkerState.DIRTY)
        and not report.staged
        and not is_on_loan(state, record.member.pod_uid)
    )


def _find_donor(state: State, borrower: MemberRecord, loan: Loan) -> MemberRecord | None:
    """A free member that serves the version on as many ranks and devices of one kind; another one at each attempt."""
    lending = {other.donor for other in state.loans.values()}
    donors = [
        record
        for uid, record in sorted(state.members.items(), key=lambda item: item[1].member.engine)
        if uid not in lending
        and record.member.ranks == borrower.member.ranks
        and is_admitted(record, state.version)
        and _serves(record.report, loan)
        and not record.abort_owed
        and not is_member_busy(state, record)
        and _on_cpus(record) == _on_cpus(borrower)
        and not _gpus(record) & _gpus(borrower)  # NCCL takes every GPU once
    ]
    return donors[loan.attempts % len(donors)] if donors else None


def _serves(report: WorkerReport | None, loan: Loan) -> bool:
    """Whether this may be lent: live weights that nothing beside them is about to replace, of a process that was not refused before."""
    return (
        report is not None
        and report.state is WorkerState.SERVING
        and not report.staged
        and not report.lending
        and report.instance not in loan.misfits
    )


def _gpus(record: MemberRecord) -> set[str]:
    return set(record.report.devices) - {CPU} if record.report is not None else set()


def _on_cpus(record: MemberRecord) -> bool:
    return record.report is not None and not _gpus(record)


def _change_loan(draft: Draft, borrower: str, loan: Loan) -> None:
    draft.change(loans={**draft.state.loans, borrower: loan})


def note_lend(draft: Draft, borrower: str, report: LendReport) -> None:
    """The donor listens: the late member may take the weights."""
    state = draft.state
    loan, record = state.loans.get(borrower), state.members.get(borrower)
    if loan is None or not loan.donor:
        return
    if record is None or record.report is None:
        raise AssertionError("the loan of a pod that has left is ended with it")
    _change_loan(draft, borrower, replace(loan, lent=report))
    if len(report.live_digests) != record.member.ranks or not all(report.live_digests):
        given = len([digest for digest in report.live_digests if digest])
        _break(draft, borrower, f"it gave {given} live digests for {record.member.ranks} ranks", loan.donor)
        return
    seconds = max(loan.deadline - draft.now, 0.001)
    donor = state.members.get(loan.donor)
    wire = Wire.GLOO if donor is None or _on_cpus(donor) else Wire.NCCL
    policy = state.policy
    message = Borrow(
        **draft.header(borrower, record.report.instance),
        version=loan.version,
        wire=wire,
        rendezvous=report.rendezvous,
        shape=report.shape,
        adapters=() if loan.staged else report.adapters,
        staged=loan.staged,
        pause=policy.pause if is_stale(state, record) else PauseMode.ABORT,
        pause_seconds=float(policy.deadlines.pausing_seconds),
        deadline_seconds=seconds,
        hold_seconds=float(
            2 * policy.deadlines.committing_seconds + (policy.deadlines.pausing_seconds if loan.staged else 0)
        ),
    )
    draft.call(record, Verb.BORROW, message, seconds + GRACE_SECONDS, borrower=borrower)


def note_borrow(draft: Draft, borrower: str, report: ReceiveReport) -> None:
    """The late member says what it holds now: only what the donor holds too may be committed."""
    loan = draft.state.loans.get(borrower)
    if loan is None or loan.lent is None:
        return
    if report.version != loan.version or report.live_digests != loan.lent.live_digests:
        held = f"version {report.version} with live digests {', '.join(report.live_digests) or 'none'}"
        lent = f"version {loan.version} with {', '.join(loan.lent.live_digests) or 'none'}"
        fail_loan(draft, borrower, f"it holds {held}, what was lent is {lent}")
        leave_epoch(draft, (borrower,), "what was borrowed is not what was lent")
        if draft.state.record is not None:  # what was received in an epoch before the record's is never committed
            draft.change(record=draft.state.record.above(draft.state.epoch, 0))
        return
    # Should its commit fail, as for a cache that is not reset, the next attempt waits.
    _end_attempt(draft, borrower, loan, problem="")
    poll_member_again(draft, borrower)
    draft.publish()


def fail_loan(draft: Draft, borrower: str, why: str) -> None:
    """Give this attempt up; the next one waits longer."""
    state = draft.state
    loan = state.loans.get(borrower)
    if loan is None or not loan.donor:
        return
    donor = state.members.get(loan.donor)
    name = donor.pod_name if donor else "a pod that left"
    _end_attempt(draft, borrower, loan, f"could not borrow version {loan.version} from {name}: {why}")
    draft.cancel_calls({number for number, call in state.calls.items() if call.borrower == borrower})
    poll_member_again(draft, borrower)
    draft.publish()


def _end_attempt(draft: Draft, borrower: str, loan: Loan, problem: str) -> None:
    wait = min(draft.state.timing.borrowing_retry * 2**loan.attempts, LONGEST_RETRY_SECONDS)
    if problem and not loan.attempts and _has_other_donor(draft.state, loan):
        wait = 0.0  # it may have been that donor alone
    ended = replace(loan, attempts=loan.attempts + 1, problem=problem, retry_at=draft.now + wait)
    _change_loan(draft, borrower, _without_donor(draft, ended))


def _has_other_donor(state: State, loan: Loan) -> bool:
    return any(
        uid != loan.donor and is_admitted(record, state.version) and _serves(record.report, loan)
        for uid, record in state.members.items()
    )


def _without_donor(draft: Draft, loan: Loan) -> Loan:
    known = loan.known_after if loan.staged else draft.state.next_id
    return replace(loan, staged=False, known_after=known, donor="", donor_instance="", deadline=float("inf"), lent=None)


def note_loan_failure(draft: Draft, borrower: str, verb: Verb, problem: Problem, *, refused: bool) -> None:
    """Donor or borrower refused or did not answer; whoever may still be at it is told to leave."""
    loan = draft.state.loans.get(borrower)
    if loan is None or not loan.donor:
        return
    if verb is Verb.BORROW and refused and problem.code is ProblemCode.NO_ROOM:
        _end_without_room(draft, borrower, loan)
        return
    if verb is Verb.BORROW and refused and problem.code is ProblemCode.MANIFEST_MISMATCH:
        # Shapes do not change: the same two would end up here again, at the price of a digest of all weights each.
        _change_loan(draft, borrower, replace(loan, misfits=loan.misfits | {loan.donor_instance}))
    involved = [] if verb is Verb.LEND and refused else [loan.donor]
    if verb is Verb.BORROW and not refused:
        involved.append(borrower)
    _break(draft, borrower, problem.message, *involved)


def _end_without_room(draft: Draft, borrower: str, loan: Loan) -> None:
    """Nothing has failed: the next attempt is made at once, and in place."""
    ended = replace(
        loan, cannot_stage=True, staged=False, donor="", donor_instance="", deadline=float("inf"), lent=None
    )
    _change_loan(draft, borrower, ended)
    let_go(draft, loan.donor)
    poll_member_again(draft, borrower)


def _break(draft: Draft, borrower: str, why: str, *involved: str) -> None:
    """Give the attempt up, and have these of its two sides leave it."""
    loan = draft.state.loans[borrower]
    fail_loan(draft, borrower, why)
    _release(draft, loan, involved, f"the loan ended: {why}")


def _release(draft: Draft, loan: Loan, involved: Iterable[str], reason: str) -> None:
    for uid in involved:
        if uid != loan.donor:
            leave_alone(draft, uid, reason)
        elif loan.lent is not None:
            let_go(draft, uid)
        else:
            leave_epoch(draft, (uid,), reason)  # it may not have begun: only a newer epoch keeps it from that


def lose_broken_loans(draft: Draft) -> None:
    """End every loan whose two sides do not stand as they did when it began; those of pods that left are forgotten."""
    for borrower, loan in tuple(draft.state.loans.items()):
        broken = _find_break(draft, borrower, loan) if loan.donor else None
        if broken is not None:
            why, involved = broken
            _break(draft, borrower, why, *involved)
    members = draft.state.members
    if not members.keys() >= draft.state.loans.keys():
        draft.change(loans={uid: loan for uid, loan in draft.state.loans.items() if uid in members})


def _find_break(draft: Draft, borrower: str, loan: Loan) -> tuple[str, tuple[str, ...]] | None:
    """Why the loan cannot go on, and who has to be told; None while it can."""
    taker, donor = draft.state.members.get(borrower), draft.state.members.get(loan.donor)
    if donor is None:
        return "it left the fleet", (borrower,)
    if taker is None:
        return "the borrower left the fleet", (loan.donor,)
    silence = draft.state.timing.unreachable
    for record in (taker, donor):
        if draft.now - record.failing_since >= silence:
            return f"{record.pod_name} has not answered for {silence:g} s", (borrower, loan.donor)
    said = donor.report
    if said is not None and said.instance != loan.donor_instance:
        return f"the container of {donor.pod_name} restarted", (borrower,)
    if said is not None and (said.state, said.version) != (WorkerState.SERVING, loan.version):
        return f"{donor.pod_name} is {said.state.value} with version {said.version}", (borrower, loan.donor)
    if taker.report is not None and taker.report.instance != loan.instance:
        return f"the container of {taker.pod_name} restarted", (loan.donor,)
    return None


def end_loans(draft: Draft, reason: str) -> None:
    """End every loan under way: lenders and borrowers leave it, and may take part in what comes next."""
    loans = draft.state.loans
    draft.change(loans={})
    draft.cancel_calls({number for number, call in draft.state.calls.items() if call.borrower})
    for borrower, loan in loans.items():
        if loan.donor:
            _release(draft, loan, (borrower, loan.donor) if loan.lent is not None else (loan.donor,), reason)
