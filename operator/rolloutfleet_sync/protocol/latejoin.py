"""Late joiners: an engine that lacks the committed version gets it out of a peer's memory, without the trainer.

Between refits, a member that is up, has been told the version and does not hold it borrows it from a member that serves it: ``lend`` to the
donor, which goes on serving, then ``borrow`` to the late one, in kernel format, rank from rank. Commit, resume and admission follow as the
ordinary work of :mod:`~rolloutfleet_sync.protocol.members`. A donor lends to one peer at a time, several donors lend at once. The calls
carry the current epoch, so a kept group stays valid; the next refit re-forms it when its members have changed. An attempt that fails is
made again later, each time after a longer wait. A refit that begins ends every loan: the group has to be formed anew for the late member
anyway, and brings it a newer version. Without a peer the member waits for that refit.
"""

from dataclasses import replace

from rolloutfleet.contract.policy import Wire
from rolloutfleet.contract.problems import Problem
from rolloutfleet.contract.worker import Borrow, Lend, LendReport, ReceiveReport, WorkerReport, WorkerState
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.members import is_admitted, is_member_busy, is_on_loan, leave_epoch, poll_member_again
from rolloutfleet_sync.protocol.model import Loan, MemberRecord, State, Verb

BORROWERS = frozenset({WorkerState.SERVING, WorkerState.PAUSED, WorkerState.DIRTY})
LONGEST_RETRY_SECONDS = 60.0
CPU = "cpu"


def offer_loan(draft: Draft, pod_uid: str) -> None:
    """Begin to give this member the committed version, if it lacks it and a peer can lend it now."""
    state = draft.state
    record = state.members.get(pod_uid)
    if record is None or not _wants_loan(draft, record):
        return
    known = state.loans.get(pod_uid)
    loan = known if known is not None and known.version == state.version else Loan(state.version)
    if draft.now < loan.retry_at:
        return
    donor = _find_donor(state, record, loan.attempts)
    if donor is None or donor.report is None:
        return
    _change_loan(draft, pod_uid, replace(loan, donor=donor.member.pod_uid, lent=None))
    seconds = float(state.policy.deadlines.transferring_seconds)
    wire = Wire.NCCL if set(donor.report.devices) - {CPU} else Wire.GLOO
    message = Lend(
        **draft.header(donor.member.pod_uid, donor.report.instance),
        version=state.version,
        wire=wire,
        deadline_seconds=seconds,
    )
    draft.call(donor, Verb.LEND, message, seconds, borrower=pod_uid)
    draft.publish()


def _wants_loan(draft: Draft, record: MemberRecord) -> bool:
    state, report = draft.state, record.report
    return (
        state.version > 0
        and state.active is None
        and state.queued is None
        and not state.reading
        and not state.stopping
        and not any(each.waiting for each in state.rounds.values())
        and record.failure is None
        and record.call is None
        and not record.abort_owed
        and report is not None
        and report.state in BORROWERS
        and not (report.version == state.version and report.state is not WorkerState.DIRTY)
        and not is_on_loan(state, record.member.pod_uid)
    )


def _find_donor(state: State, borrower: MemberRecord, attempts: int) -> MemberRecord | None:
    """A free member that serves the version on as many ranks and devices of one kind; another one at each attempt."""
    lending = {loan.donor for loan in state.loans.values()}
    donors = [
        record
        for uid, record in sorted(state.members.items(), key=lambda item: item[1].member.engine)
        if uid not in lending
        and record.member.ranks == borrower.member.ranks
        and is_admitted(record, state.version)
        and _serves(record.report)
        and not is_member_busy(state, record)
        and _on_cpus(record) == _on_cpus(borrower)
    ]
    return donors[attempts % len(donors)] if donors else None


def _serves(report: WorkerReport | None) -> bool:
    return report is not None and report.state is WorkerState.SERVING


def _on_cpus(record: MemberRecord) -> bool:
    return record.report is not None and not set(record.report.devices) - {CPU}


def _change_loan(draft: Draft, borrower: str, loan: Loan) -> None:
    draft.change(loans={**draft.state.loans, borrower: loan})


def note_lend(draft: Draft, borrower: str, report: LendReport) -> None:
    """The donor listens: the late member may take the weights."""
    state = draft.state
    loan, record = state.loans.get(borrower), state.members.get(borrower)
    if loan is None or not loan.donor:
        return
    if record is None or record.report is None:
        fail_loan(draft, borrower, "the borrower left the fleet")
        return
    deadlines = state.policy.deadlines
    seconds = float(deadlines.transferring_seconds)
    donor = state.members.get(loan.donor)
    wire = Wire.GLOO if donor is None or _on_cpus(donor) else Wire.NCCL
    _change_loan(draft, borrower, replace(loan, lent=report))
    message = Borrow(
        **draft.header(borrower, record.report.instance),
        version=loan.version,
        wire=wire,
        rendezvous=report.rendezvous,
        shape=report.shape,
        adapters=report.adapters,
        deadline_seconds=seconds,
        hold_seconds=float(2 * deadlines.committing_seconds),
    )
    draft.call(record, Verb.BORROW, message, seconds, borrower=borrower)


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
    _change_loan(draft, borrower, Loan(loan.version, loan.attempts + 1, problem, draft.now + wait))


def note_loan_failure(draft: Draft, borrower: str, verb: Verb, problem: Problem, *, refused: bool) -> None:
    """Donor or borrower refused or did not answer; whoever may still be at it is told to leave."""
    loan = draft.state.loans.get(borrower)
    if loan is None or not loan.donor:
        return
    fail_loan(draft, borrower, problem.message)
    involved = [] if verb is Verb.LEND and refused else [loan.donor]
    if verb is Verb.BORROW and not refused:
        involved.append(borrower)
    if involved:
        leave_epoch(draft, involved, f"the loan ended: {problem.message}")


def lose_silent_loans(draft: Draft) -> None:
    """A loan ends early when one of its two has been silent for too long."""
    state = draft.state
    for borrower, loan in state.loans.items():
        for uid in (borrower, loan.donor) if loan.donor else ():
            record = state.members.get(uid)
            if record is None or draft.now - record.failing_since >= state.timing.unreachable:
                why = (
                    f"{record.pod_name if record else 'the donor'} has not answered for {state.timing.unreachable:g} s"
                )
                fail_loan(draft, borrower, why)
                leave_epoch(draft, (borrower, loan.donor), f"the loan ended: {why}")
                break


def end_loans(draft: Draft, reason: str) -> None:
    """End every loan under way: lenders and borrowers leave it, and may take part in what comes next."""
    involved = {uid for borrower, loan in draft.state.loans.items() if loan.donor for uid in (borrower, loan.donor)}
    draft.change(loans={})
    draft.cancel_calls({number for number, call in draft.state.calls.items() if call.borrower})
    if involved:
        leave_epoch(draft, involved, reason)
