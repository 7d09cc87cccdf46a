"""Whether what arrived is what was sent, rank by rank; and the digests that stand for a whole refit."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import TrainerSent
from rolloutfleet.contract.worker import ReceiveReport
from rolloutfleet_sync.protocol.ledger import TRAINER
from rolloutfleet_sync.protocol.model import Refit, Seat

WHOLE_BROADCAST = ""
"""Key of the digest that every rank must hold when tensors are broadcast whole."""


def _is_by_layout(refit: Refit) -> bool:
    return refit.choice is not None and refit.choice.transport.by_layout


def layout_digests(refit: Refit) -> tuple[str, ...]:
    """Digest of the layout of every worker rank, in rank order; empty for whole broadcasts."""
    if not _is_by_layout(refit):
        return ()
    return tuple(layout.digest for seat in refit.seats for layout in refit.layouts[seat.pod_uid])


def find_unverified(refit: Refit, sent: TrainerSent) -> dict[str, Problem]:
    """By pod uid, in which way members do not hold what was sent; by :data:`TRAINER`, what the trainer itself left out.

    Digests are compared rank by rank: what a rank received with what the trainer sent for its layout, and live parameters between
    ranks of one number and layout on engines of one size, of which those that differ from the most are at fault, or all where there is
    no such majority.
    """
    if not _is_by_layout(refit) and (sent.tensors, sent.nbytes) != (refit.tensors, refit.nbytes):
        message = f"the trainer sent {sent.tensors} tensors of {sent.nbytes} bytes, its manifest has {refit.tensors} of {refit.nbytes}"
        return {TRAINER: _mismatch(message, TRAINER)}
    keys = _keys(refit)
    faults: dict[str, Problem] = {}
    live: dict[tuple[int, int, str], list[tuple[Seat, str]]] = defaultdict(list)
    for seat in refit.seats:
        report = refit.received[seat.pod_uid]
        problem = _report_fault(refit, seat, report)
        if problem is not None:
            faults[seat.pod_uid] = problem
            continue
        for rank, received in enumerate(report.received_digests):
            key = keys[seat.pod_uid][rank]
            expected = sent.digests.get(key)
            if not expected:
                what = f"for layout {key} of local rank {rank} of {seat.pod_name}" if key else "for the whole broadcast"
                message = f"the trainer gave {'no' if expected is None else 'an empty'} digest {what}"
                return {TRAINER: _mismatch(message, TRAINER)}
            if received != expected:
                message = f"local rank {rank} of {seat.pod_name} received bytes of digest {received}, the trainer sent it {expected}"
                faults.setdefault(seat.pod_uid, _mismatch(message, seat.pod_name))
            elif report.live_digests:
                live[seat.ranks, rank, key].append((seat, report.live_digests[rank]))
    for (_, rank, _), held in live.items():
        for uid, problem in _minority(rank, held).items():
            faults.setdefault(uid, problem)
    return faults


def _minority(rank: int, held: Sequence[tuple[Seat, str]]) -> dict[str, Problem]:
    """Those whose live parameters differ from what most engines hold."""
    counts = Counter(digest for _, digest in held).most_common(2)
    if len(counts) < 2:
        return {}
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    faults: dict[str, Problem] = {}
    for seat, mine in held:
        if mine == usual:
            continue
        reference, theirs = next(
            (other, digest) for other, digest in held if digest != mine and usual in {None, digest}
        )
        message = f"local rank {rank} of {seat.pod_name} holds live parameters of digest {mine}, that of {reference.pod_name} {theirs}"
        faults[seat.pod_uid] = _mismatch(message, seat.pod_name)
    return faults


def _keys(refit: Refit) -> Mapping[str, tuple[str, ...]]:
    if not _is_by_layout(refit):
        return {seat.pod_uid: (WHOLE_BROADCAST,) * seat.ranks for seat in refit.seats}
    return {uid: tuple(layout.digest for layout in layouts) for uid, layouts in refit.layouts.items()}


def _report_fault(refit: Refit, seat: Seat, report: ReceiveReport) -> Problem | None:
    name = seat.pod_name
    if report.version != refit.version:
        return _mismatch(f"{name} loaded version {report.version}, not {refit.version}", name)
    by_layout = _is_by_layout(refit)
    whole = (refit.tensors, refit.nbytes * seat.ranks)
    if not by_layout and (report.tensors, report.nbytes) != whole:
        return _mismatch(
            f"{name} received {report.tensors} tensors of {report.nbytes} bytes, not {whole[0]} of {whole[1]}", name
        )
    for what, digests in (("received", report.received_digests), ("live", report.live_digests)):
        # By layout, what was received is the digest of the live parameters already.
        if len(digests) != seat.ranks and (digests or what == "received" or not by_layout):
            return _mismatch(f"{name} gave {len(digests)} {what} digests for {seat.ranks} ranks", name)
        if "" in digests:
            return _mismatch(f"{name} gave an empty {what} digest for local rank {digests.index('')}", name)
    return None


def combine_sent_digests(digests: Mapping[str, str]) -> str:
    """One hex digest over all that was sent: that of a whole broadcast itself, or one over those of all layouts."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return sha256("\n".join(f"{key} {digest}" for key, digest in sorted(digests.items())).encode()).hexdigest()


def combine_live_digests(digests: Sequence[str]) -> str:
    """One hex digest over the live parameters of all ranks of an engine."""
    return sha256("\n".join(digests).encode()).hexdigest()


def describe_detours(refit: Refit, limit: int = 8) -> tuple[str, ...]:
    """What goes through vLLM's loader in this refit, and why: the ranks' own sentences, each once, or one for a whole broadcast."""
    if refit.choice is None:
        return ()
    if not refit.choice.transport.by_layout:
        return (
            f"every tensor: {refit.choice.transport} broadcasts whole tensors, which vLLM's loader cuts for each rank",
        )
    sentences = {sentence for layouts in refit.layouts.values() for layout in layouts for sentence in layout.detours}
    return tuple(sorted(sentences)[:limit])


def _mismatch(message: str, member: str) -> Problem:
    return Problem(code=ProblemCode.DIGEST_MISMATCH, message=message, member=member)
