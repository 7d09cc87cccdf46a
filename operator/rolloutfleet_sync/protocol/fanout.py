"""Calls of a refit to its members: one message for each seat, all at once."""

from collections.abc import Callable
from typing import Any

from rolloutfleet.contract.members import Member
from rolloutfleet.contract.worker import Call
from rolloutfleet_sync.protocol.draft import Draft
from rolloutfleet_sync.protocol.model import MemberRecord, Seat, Verb

GRACE_SECONDS = 0.5
"""A worker's own deadline ends first, so that its reason arrives."""


def fan_out(draft: Draft, verb: Verb, message: Callable[[Seat], Call], seats: tuple[Seat, ...] | None = None) -> None:
    """Call every seat of the refit, or these ones, and wait for each of them."""
    chosen = draft.refit.seats if seats is None else seats
    draft.change_refit(waiting=frozenset(seat.pod_uid for seat in chosen))
    for seat in chosen:
        call_seat(draft, seat, verb, message(seat))


def call_seat(draft: Draft, seat: Seat, verb: Verb, message: Call) -> None:
    """Call one seat of the refit until the phase's deadline; one that has left the roster since is there for a while still."""
    record = draft.state.members.get(seat.pod_uid) or _record_of(seat)
    draft.call(record, verb, message, remaining_seconds(draft) + GRACE_SECONDS, refit=draft.refit.id)


def _record_of(seat: Seat) -> MemberRecord:
    member = Member(
        engine=seat.engine, pod_name=seat.pod_name, pod_uid=seat.pod_uid, address=seat.address, ranks=seat.ranks
    )
    return MemberRecord(member=member, poll_at=float("inf"))


def seat_header(draft: Draft, seat: Seat, epoch: int | None = None) -> dict[str, Any]:
    """The fields that every call to this seat carries; the refit's epoch unless another is given."""
    return draft.header(seat.pod_uid, seat.instance, draft.refit.epoch if epoch is None else epoch)


def remaining_seconds(draft: Draft) -> float:
    """Seconds until the phase's deadline, never none at all."""
    return max(draft.refit.deadline - draft.now, 0.001)


def surviving_seats(draft: Draft) -> tuple[Seat, ...]:
    """The refit's seats without those that were left behind after the decision."""
    refit = draft.refit
    return tuple(seat for seat in refit.seats if seat.pod_uid not in refit.casualties)
