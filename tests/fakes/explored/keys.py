"""One key for all moments that lead to the same futures.

What is left out, because nothing that the parties do depends on it: words for people, seconds that were measured, what has ended. Times
count from now, calls by what they are and by what they are compared with, and pods by how they stand instead of by their names, so that
engines that are alike can change places. A field that this module does not know is part of the key as it is.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from fakes.explored.engine import Engine, Work
from fakes.explored.world import TIMING, Reply, Request, World
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import RefitPolicy, Strategy
from rolloutfleet.contract.problems import Problem
from rolloutfleet.contract.worker import LendReport, WorkerReport
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.model import TERMINAL, Loan, MemberRecord, Refit, State
from rolloutfleet_worker.fence import Identity

LEFT_OUT = frozenset(
    {
        "sequence", "seconds", "started", "phase_started", "pause_seconds", "slowest", "reason", "message",
        "manifest", "tensors", "nbytes", "detours", "deadline_seconds", "hold_seconds", "rendezvous", "shape",
        "receive_seconds", "load_seconds", "live_digest", "engine", "offset", "rank_offset", "ranks",
        "arrived", "pod_name",
    }
)  # fmt: skip
TIMES = frozenset(
    {"poll_at", "deadline", "expires", "read_at", "retry_at", "close_at", "hold_until", "lend_until", "stale_until"}
)
UNORDERED = frozenset({"seats", "members"})
"""By engine, which is no difference between engines."""
ENGINES = frozenset({"left_behind", "absent"})
"""Numbers of engines."""
STATE_FIELDS_APART = frozenset(
    {
        "identity", "policy", "timing", "members", "refit", "queued", "finished", "calls", "next_id", "roster", "write",
        "rounds",
    }
)  # fmt: skip
REFIT_FIELDS_APART = frozenset({"first_call", "received_before"})
FAR = 10_000.0


def _relative(moment: float, now: float) -> float:
    """Seconds until then; what is due counts as now."""
    return min(max(moment - now, 0.0), FAR)


def _since(moment: float, now: float) -> float:
    """Seconds since then, as far as anybody counts them."""
    return min(now - moment, TIMING.unreachable) if moment <= now else -1.0


class _Keys:
    """Walks one moment."""

    def __init__(self, world: World, labels: dict[str, str]) -> None:
        self.world = world
        self.now = world.now
        self.labels = labels
        self.engines = {engine.member.engine: labels.get(engine.uid, "") for engine in world.engines}

    def walk(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, str):
            return self.labels.get(value, value)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (tuple, list)):
            return tuple([self.walk(each) for each in value])
        if isinstance(value, (frozenset, set)):
            return tuple(sorted([self.walk(each) for each in value], key=repr))
        if isinstance(value, Mapping):
            return tuple(sorted([(self.walk(key), self.walk(each)) for key, each in value.items()], key=repr))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, WorkerReport):
            return self._report(value)
        if isinstance(value, Problem):
            return value.code.value, self.labels.get(value.member, value.member)
        if isinstance(value, LendReport):
            return value.live_digests
        if isinstance(value, Loan):
            names = [each.name for each in fields(value)]
            return min(value.attempts, 4 + value.attempts % 2), *self._fields(
                value, names, frozenset({"attempts", "known_after"})
            )
        if isinstance(value, (Manifest, RefitPolicy, Identity)):
            return None
        if is_dataclass(value):
            return (type(value).__name__, *self._fields(value, [each.name for each in fields(value)]))
        if isinstance(value, BaseModel):
            return (type(value).__name__, *self._fields(value, type(value).model_fields))
        raise TypeError(f"no key for a {type(value).__name__}")

    def _fields(self, value: Any, names: Any, apart: frozenset[str] = frozenset()) -> list[Any]:
        found = []
        for name in names:
            if name in LEFT_OUT or name in apart:
                continue
            each = getattr(value, name)
            if name == "failing_since":
                found.append(_since(each, self.now))
            elif name in TIMES:
                found.append(self._times(each))
            elif name in ENGINES:
                found.append(tuple(sorted([self.engines.get(number, str(number)) for number in each])))
            elif name == "published" and isinstance(value, State):
                found.append(self._publications(value))
            elif name in UNORDERED:
                found.append(tuple(sorted([self.walk(item) for item in each], key=repr)))
            else:
                found.append(self.walk(each))
        return found

    def _times(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return tuple(sorted((self.labels.get(key, key), _relative(at, self.now)) for key, at in value.items()))
        return _relative(value, self.now)

    def _report(self, report: WorkerReport) -> Any:
        known = _reports.get(id(report))
        if known is None or known[0] is not report:
            names = [
                name
                for name in WorkerReport.model_fields
                if name not in {"message", "pod_name", "pod_uid", "instance", "engine", "environment"}
            ]
            known = report, tuple([self.walk(getattr(report, name)) for name in names])
            if len(_reports) > 200_000:
                _reports.clear()
            _reports[id(report)] = known
        return self.labels.get(report.pod_uid), self.labels.get(report.instance), known[1]

    def _publications(self, state: State) -> Any:
        """When versions became the fleet's counts only while older ones may be served."""
        longest = state.policy.rolling.max_stale_seconds
        if state.policy.strategy is not Strategy.ROLLING:
            return ()
        return tuple((version, min(self.now - at, longest)) for version, at in state.published)

    # Parts that are compared with others instead of standing for themselves.

    def _counts(self, number: int, pod_uid: str) -> tuple[bool, bool]:
        refit = self.world.state.refit
        if refit is None or refit.phase in TERMINAL:
            return True, True
        return number >= refit.first_call, number >= refit.received_before.get(pod_uid, number + 1)

    def _is_old(self, pod_uid: str, loan: Loan) -> bool:
        record = self.world.state.members.get(pod_uid)
        return record is not None and record.reported_by < loan.known_after

    def call(self, number: int) -> Any:
        call = self.world.state.calls.get(number)
        if call is None:
            return None
        record = self.world.state.members.get(call.pod_uid)
        return (
            call.verb.value,
            self.labels.get(call.pod_uid, call.pod_uid),
            call.refit,
            call.round_id,
            self.labels.get(call.borrower, call.borrower),
            self._counts(number, call.pod_uid),
            record is not None and record.call == number,
        )

    def record(self, record: MemberRecord) -> Any:
        return (
            self.labels.get(record.member.pod_uid),
            bool(record.member.address),
            *self._fields(
                record,
                [each.name for each in fields(record)],
                frozenset({"member", "reported_by", "call"}),
            ),
            self._counts(record.reported_by, record.member.pod_uid),
            record.call is not None and self.call(record.call),
        )

    def request(self, request: Request) -> Any:
        command = request.command
        return (
            self.labels.get(command.pod_uid, command.pod_uid),
            self.labels.get(command.address, command.address),
            command.verb.value,
            self.walk(command.message),
            self.call(command.call),
            _relative(request.expires, self.now),
            request.held,
            request.orphan,
        )

    def reply(self, reply: Reply) -> Any:
        event = reply.event
        said = (
            self.walk(event.answer)
            if isinstance(event, events.CallAnswered)
            else (self.walk(event.problem), event.refused)
        )
        return (
            self.labels.get(reply.pod_uid),
            self.call(event.call),
            said,
            _relative(reply.expires, self.now),
            reply.held,
        )

    def engine(self, engine: Engine) -> Any:
        names = [each.name for each in fields(engine)]
        found = self._fields(engine, names, frozenset({"member", "number", "work"}))
        work = engine.work and self.work(engine.work)
        return self.labels.get(engine.uid), self.labels.get(engine.fence.identity.instance), *found, work

    def work(self, work: Work) -> Any:
        port = work.call.rendezvous.port if hasattr(work.call, "rendezvous") else 0
        lender = next((each.uid for each in self.world.engines if 1024 + each.number == port), "")
        return (
            self.call(work.number),
            type(work.call).__name__,
            self.walk(work.call),
            self.walk(work.was),
            _relative(work.deadline, self.now),
            work.stalled,
            self.labels.get(lender, ""),
        )

    def refit(self, refit: Refit | None) -> Any:
        if refit is None:
            return None
        if refit.phase in TERMINAL:
            return refit.id, refit.version, refit.phase.value, refit.committed, refit.adapter is not None
        names = [each.name for each in fields(refit)]
        return tuple(self._fields(refit, names, REFIT_FIELDS_APART))

    def state(self, state: State) -> Any:
        names = [each.name for each in fields(state)]
        seen = {key: self.record(record) for key, record in state.members.items()}
        shown = state.finished[-1:] if state.finished and state.finished[-1] is not state.refit else ()
        return (
            *self._fields(state, names, STATE_FIELDS_APART),
            tuple(sorted(seen.values(), key=repr)),
            self.refit(state.refit),
            self.refit(state.queued),
            tuple(self.refit(each) for each in shown),
            state.write is not None,
            tuple(sorted((self.labels.get(uid, ""), self._is_old(uid, loan)) for uid, loan in state.loans.items())),
            None
            if state.roster is None
            else tuple(sorted(self.labels.get(each.pod_uid, "") for each in state.roster.members)),
            tuple(sorted([self.call(number) for number in state.calls], key=repr)),
        )


_reports: dict[int, tuple[WorkerReport, Any]] = {}


def _identities(world: World) -> list[tuple[int, str, tuple[str, ...]]]:
    """Every pod that anybody still speaks of: by engine, its uid, and everything that is named after it."""
    members = {engine.uid: engine.member for engine in world.engines}
    for record in world.state.members.values():
        members.setdefault(record.member.pod_uid, record.member)
    refit = world.state.refit
    named = {uid: (uid, member.pod_name, member.address) for uid, member in members.items()}
    engine_of = {uid: member.engine for uid, member in members.items()}
    seats = list(refit.seats if refit is not None else ()) + list(world.state.group.seats if world.state.group else ())
    for seat in seats:
        named.setdefault(seat.pod_uid, (seat.pod_uid, seat.pod_name, seat.address))
        engine_of.setdefault(seat.pod_uid, seat.engine)
    return sorted((engine_of[uid], uid, names) for uid, names in named.items())


def key_of(world: World) -> Any:
    """The key of a moment, but for the faults that are left."""
    order = _order(world)
    labels: dict[str, str] = {}
    for position, uid, names in order:
        label = f"p{position}"
        for name in names:
            labels.setdefault(name, label)
        labels[uid] = label
    for engine in world.engines:
        labels[engine.fence.identity.instance] = f"now {labels[engine.uid]}"
    keys = _Keys(world, labels)
    state = world.state
    return (
        keys.state(state),
        tuple(sorted([keys.engine(engine) for engine in world.engines], key=repr)),
        tuple(sorted([keys.request(each) for each in world.requests], key=repr)),
        tuple(sorted([keys.reply(each) for each in world.replies], key=repr)),
        tuple((type(write).__name__, keys.walk(write.record)) for write in world.writes),
        keys.walk(tuple(late for late in world.late_writes)),
        world.reads,
        world.unpublished,
        keys.walk(world.stored),
        world.revision - world.known_revision,
        keys.walk(world.published),
        keys.walk(world.trainer),
        keys.walk(tuple(group for group in world.groups if group.epoch >= state.epoch - 1)),
        world.roster_told,
        world.refits_left,
    )


def _order(world: World) -> list[tuple[int, str, tuple[str, ...]]]:
    """Pods by how they stand: two that are alike have no order that matters."""
    found = _identities(world)
    if len(found) < 2:
        return [(index, uid, names) for index, (_, uid, names) in enumerate(found)]
    labels: dict[str, str] = {}
    for _, _, names in found:
        labels.update(dict.fromkeys(names, "x"))
    for engine in world.engines:
        labels[engine.fence.identity.instance] = "now"
    keys = _Keys(world, labels)
    state = world.state
    refit = state.active
    seats = {seat.pod_uid: seat for seat in refit.seats} if refit is not None else {}
    signed = []
    for engine, uid, names in found:
        pod = world.engine(uid)
        record = state.members.get(uid)
        seat = seats.get(uid)
        signature = (
            keys.engine(pod) if pod is not None else engine,
            keys.record(record) if record is not None else None,
            refit is not None
            and (uid in refit.waiting, uid in refit.received, uid in refit.casualties, uid in refit.left_paused),
            seat is not None and labels.get(seat.instance, ""),
            [keys.request(each) for each in world.requests if each.command.pod_uid == uid],
            [keys.reply(each) for each in world.replies if each.pod_uid == uid],
            [(uid in group.ended, uid in group.gone) for group in world.groups],
        )
        signed.append((repr(signature), uid, names))
    return [(index, uid, names) for index, (_, uid, names) in enumerate(sorted(signed))]
