"""A transition under construction: the state so far and the commands that go with it."""

from collections.abc import Set as AbstractSet
from typing import Any

from rolloutfleet.contract.worker import Call
from rolloutfleet_sync.protocol.commands import CallWorker, CancelCalls, Command, PublishStatus
from rolloutfleet_sync.protocol.model import MemberRecord, PendingCall, Refit, State, Verb
from rolloutfleet_sync.protocol.replacing import replaced


class Draft:
    """Lives for one step; functions of the protocol change it in place so that each of them reads as a sentence."""

    __slots__ = ("commands", "now", "state")

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []

    @property
    def refit(self) -> Refit:
        """The refit under way; only called where there is one."""
        if self.state.refit is None:
            raise AssertionError("no refit is under way")
        return self.state.refit

    def change(self, **fields: Any) -> None:
        self.state = replaced(self.state, fields)

    def change_refit(self, **fields: Any) -> None:
        refit = self.refit
        self.change(refit=replaced(refit, {"sequence": refit.sequence + 1, **fields}))

    def change_member(self, pod_uid: str, **fields: Any) -> None:
        record = self.state.members.get(pod_uid)
        if record is not None:
            self.change(members={**self.state.members, pod_uid: replaced(record, fields)})

    def new_id(self) -> int:
        number = self.state.next_id
        self.change(next_id=number + 1)
        return number

    def raise_epoch(self) -> int:
        """The next epoch; a kept group ends with it, since workers refuse calls of an older one."""
        self.change(epoch=self.state.epoch + 1, group=None)
        return self.state.epoch

    def publish(self) -> None:
        self.commands.append(PublishStatus())

    def call(
        self,
        record: MemberRecord,
        verb: Verb,
        message: Call | None,
        seconds: float,
        *,
        refit: str = "",
        round_id: str = "",
        borrower: str = "",
    ) -> int:
        """The id of a new call to one member."""
        number = self.new_id()
        uid = record.member.pod_uid
        pending = PendingCall(number, uid, verb, refit, round_id, borrower)
        self.change(calls={**self.state.calls, number: pending})
        self.commands.append(
            CallWorker(number, record.pod_name, uid, record.member.address, verb, message, max(seconds, 0.001))
        )
        return number

    def take_call(self, number: int) -> PendingCall | None:
        """The call of this id, now answered; None when nobody waits for it any more."""
        pending = self.state.calls.get(number)
        if pending is not None:
            left = dict(self.state.calls)  # a copy and a deletion cost a tenth of a comprehension
            del left[number]
            self.change(calls=left)
        return pending

    def cancel_calls(self, numbers: AbstractSet[int]) -> None:
        """Forget these calls: answers that still come are ignored."""
        if numbers:
            self.change(calls={number: call for number, call in self.state.calls.items() if number not in numbers})
            self.commands.append(CancelCalls(tuple(sorted(numbers))))

    def cancel_refit_calls(self, refit: str) -> None:
        self.cancel_calls({number for number, call in self.state.calls.items() if call.refit == refit})

    def header(self, pod_uid: str, instance: str, epoch: int | None = None) -> dict[str, Any]:
        """The fields that every control call carries."""
        return {
            "fleet_uid": self.state.identity.fleet_uid,
            "pod_uid": pod_uid,
            "instance": instance,
            "epoch": self.state.epoch if epoch is None else epoch,
        }
