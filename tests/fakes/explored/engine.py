"""An engine pod as an immutable value: the worker's real fence, and what its verbs do to it.

Each function here follows one verb of :mod:`rolloutfleet_worker.pod`, :mod:`~rolloutfleet_worker.peerverbs` or
:mod:`~rolloutfleet_worker.podbase`; ``test_explored_engine`` holds the two against each other. What takes a while (a join, a transfer, a
loan) is left open as :class:`Work`, and ended by the world.
"""

from dataclasses import dataclass, replace
from functools import cache

from pydantic import BaseModel

from rolloutfleet.contract.manifest import ManifestFaults
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import CachePolicy
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import (
    Abort,
    Admit,
    Borrow,
    Call,
    Check,
    CheckReport,
    Commit,
    CommitReport,
    Join,
    JoinReport,
    LayoutSummary,
    Lend,
    LendReport,
    LetGo,
    Pause,
    Prepare,
    PrepareReport,
    Receive,
    ReceiveReport,
    Rendezvous,
    Resume,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_worker.fence import Fence, Identity, Stale

NEVER = float("inf")
NO_FAULTS = ManifestFaults()
Weights = tuple[int, str]
"""Version and digest of the bytes."""


@dataclass(frozen=True, slots=True)
class Work:
    """What holds the engine's turn until the world ends it."""

    number: int
    """The call that asked for it."""
    call: Join | Receive | Borrow
    was: Fence
    deadline: float
    stalled: bool = False
    """It goes on, but not now."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One launcher process with its engine, from its start to its end."""

    member: Member
    number: int
    fence: Fence
    weights: Weights | None = (0, "")
    """None while they are a mixture."""
    beside: Weights | None = None
    """What lies in the second buffer."""
    paused: bool = False
    """Whether vLLM runs no step."""
    stale_cache: bool = False
    """Whether the prefix cache holds values of other weights than those in memory."""
    cache_reset_for: int = 0
    cache_answer: bool = True
    calibrated: bool = True
    """Whether the layout is known from a load before."""
    work: Work | None = None
    hold_until: float = NEVER
    lend_until: float = NEVER
    stale_until: float = NEVER
    """When it stops serving a version that is not the newest."""
    alive: bool = True
    corrupts: bool = False
    """The next bytes that it receives are damaged."""

    @property
    def uid(self) -> str:
        return self.member.pod_uid

    @property
    def leaving(self) -> bool:
        """Whether it was told to end, and has not yet."""
        return self.alive and bool(self.fence.leaving)

    @property
    def owes_an_end(self) -> bool:
        """Whether it stays, once told to end, for a version that is neither committed nor given up."""
        unsettled = {WorkerState.PAUSED, WorkerState.RECEIVING, WorkerState.RECEIVED}
        return self.fence.state in unsettled or self.fence.staged

    @property
    def serves(self) -> bool:
        """Whether requests enter and steps of the model answer them."""
        return self.alive and self.fence.state is WorkerState.SERVING and not self.fence.unready_reason()

    def report(self, now: float) -> WorkerReport:
        """What the launcher says of it."""
        fence = self.fence
        left = {Stale.ALLOWED: max(self.stale_until - now, 0.0), Stale.OVER: 0.0}.get(fence.stale)
        return WorkerReport(
            fleet_uid=fence.identity.fleet_uid,
            pod_name=fence.identity.pod_name,
            pod_uid=fence.identity.pod_uid,
            instance=fence.identity.instance,
            engine=self.member.engine,
            ranks=self.member.ranks,
            state=fence.state,
            epoch=fence.epoch,
            version=fence.version,
            version_in_flight=fence.version_in_flight,
            admitted=fence.admitted,
            staged=fence.staged,
            lending=fence.lending,
            leaving=bool(fence.leaving),
            stale_seconds=left,
            devices=("cpu",) * self.member.ranks,
            message=fence.message or fence.unready_reason(),
        )


def start_engine(member: Member, number: int, *, calibrated: bool = True) -> Engine:
    """A container that has just come up with the weights of its image."""
    identity = Identity("f", "fleet-uid", member.pod_name, member.pod_uid, f"i{number}")
    return Engine(member, number, Fence(identity).started(), calibrated=calibrated)


def needs_turn(call: Call) -> bool:
    """Whether the call waits until nothing else has the engine's turn."""
    return not isinstance(call, Check | Abort | LetGo)


def handle(engine: Engine, call: Call, number: int, now: float) -> tuple[Engine, BaseModel | ProblemError | None]:
    """The engine after the call, and its answer; None where the answer comes with the end of its work."""
    try:
        fence = engine.fence.accept(call)
    except ProblemError as refusal:
        return engine, refusal
    accepted = replace(engine, fence=fence)
    try:
        return _handle(accepted, call, number, now)
    except ProblemError as refusal:
        return accepted, refusal


def _handle(engine: Engine, call: Call, number: int, now: float) -> tuple[Engine, BaseModel | ProblemError | None]:
    fence = engine.fence
    match call:
        case Abort():
            engine = end_epoch(engine, call.reason)
            return engine, engine.report(now)
        case LetGo():
            engine = stop_lending(engine)
            return engine, engine.report(now)
        case Check():
            engine = replace(engine, fence=fence.check_begins())
            return engine, CheckReport(faults=NO_FAULTS, layouts=_layouts(engine.calibrated))
        case Admit():
            engine = _admit(engine, call, now)
            return engine, engine.report(now)
        case Join():
            engine = replace(engine, fence=fence.join_begins())
            return replace(engine, work=Work(number, call, fence, now + call.deadline_seconds)), None
        case Prepare():
            return replace(engine, fence=fence.prepare_begins(staged=call.staged)), PrepareReport(seconds=0.0)
        case Pause():
            engine = _pause(engine, call, now)
            return engine, engine.report(now)
        case Receive():
            return _receive(engine, call, number, now), None
        case Commit():
            return _commit(engine, call)
        case Resume():
            engine = resume(replace(engine, fence=fence.resume_begins()))
            return engine, engine.report(now)
        case Lend():
            engine = replace(engine, fence=fence.lend_begins(call.version), lend_until=now + call.deadline_seconds)
            digest = live_digest(engine.weights)
            rendezvous = Rendezvous(host="127.0.0.1", port=1024 + engine.number)
            return engine, LendReport(rendezvous=rendezvous, shape="shape", live_digests=(digest,))
        case Borrow():
            return _borrow(engine, call, number, now)
    raise AssertionError(f"engines know no call {type(call).__name__}")


def _admit(engine: Engine, call: Admit, now: float) -> Engine:
    was = engine.fence
    if call.stale_seconds is None:
        return replace(engine, fence=was.admit(call.version), stale_until=NEVER)
    fence = was.admit_stale(call.version)
    if fence.stale is not Stale.ALLOWED:
        return replace(engine, fence=fence, stale_until=NEVER)
    until = now + call.stale_seconds
    return replace(
        engine, fence=fence, stale_until=min(until, engine.stale_until) if was.stale is fence.stale else until
    )


@cache
def _layouts(calibrated: bool) -> tuple[LayoutSummary, ...]:
    placed = 38 if calibrated else 0
    digest = "placed" if calibrated else "detoured"
    return (
        LayoutSummary(
            digest=digest, shape="shape", placed_bytes=placed, detoured_bytes=38 - placed, room_bytes=1 << 30
        ),
    )


def _pause(engine: Engine, call: Pause, now: float) -> Engine:
    fence = engine.fence.pause_begins()
    hold = engine.hold_until if fence.staged else now + call.deadline_seconds
    return replace(engine, fence=fence.paused(), paused=True, hold_until=hold)


def resume(engine: Engine) -> Engine:
    """Steps of the model run again, and nothing is kept for a sync job any more."""
    return replace(engine, fence=engine.fence.resumed(), paused=False, hold_until=NEVER)


def _receive(engine: Engine, call: Receive, number: int, now: float) -> Engine:
    was = engine.fence
    fence = was.receive_begins(call.version, staged=call.staged)
    work = Work(number, call, was, now + call.deadline_seconds)
    engine = replace(engine, fence=fence, work=work, hold_until=now + call.deadline_seconds + call.hold_seconds)
    return engine if call.staged else replace(engine, weights=None, stale_cache=True)


def _commit(engine: Engine, call: Commit) -> tuple[Engine, BaseModel]:
    fence = engine.fence.commit_begins(call.version)
    reset = call.cache is not CachePolicy.KEEP
    if fence.swaps_for(call.version):
        return _swap(replace(engine, fence=fence), call.version, reset=reset)
    answer: bool | None = None
    if reset:
        answer = (engine.cache_reset_for == call.version and fence.holds(call.version)) or engine.cache_answer
    if answer is False:
        fence = fence.cache_not_reset(call.version, "vLLM answered no")
        return replace(engine, fence=fence), CommitReport(version=call.version, cache_reset=False, state=fence.state)
    fence = fence.committed(call.version)
    done = replace(engine, fence=fence)
    if answer:
        done = replace(done, cache_reset_for=call.version, stale_cache=False)
    return done, CommitReport(version=call.version, cache_reset=answer, state=fence.state)


def _swap(engine: Engine, version: int, *, reset: bool) -> tuple[Engine, BaseModel]:
    serving = engine.fence.state is WorkerState.SERVING
    answer = engine.cache_answer if reset else None
    fence = engine.fence.swap_begins().swap_done()
    moved = replace(engine, weights=engine.beside, beside=None, stale_cache=answer is not True)
    if answer is False:
        fence = fence.cache_not_reset(version, "vLLM answered no")
    else:
        fence = fence.committed(version, serving=serving)
        moved = replace(moved, cache_reset_for=version if reset else moved.cache_reset_for)
    if fence.state is WorkerState.SERVING:
        moved = replace(moved, hold_until=NEVER)
    seconds = 0.004 if serving else None
    return replace(moved, fence=fence), CommitReport(
        version=version, cache_reset=answer, state=fence.state, pause_seconds=seconds
    )


def _borrow(engine: Engine, call: Borrow, number: int, now: float) -> tuple[Engine, ProblemError | None]:
    if engine.fence.state is WorkerState.SERVING and not call.staged:
        engine = replace(engine, fence=engine.fence.paused(), paused=True, hold_until=now + call.pause_seconds)
    was = engine.fence
    try:
        fence = was.borrow_begins(call.version, staged=call.staged)
    except ProblemError as refusal:
        return engine, refusal
    until = now + call.deadline_seconds + call.hold_seconds
    work = Work(number, call, was, now + call.deadline_seconds)
    engine = replace(engine, fence=fence, work=work, hold_until=until)
    return engine if call.staged else replace(engine, weights=None, stale_cache=True), None


def live_digest(weights: Weights | None) -> str:
    """What a rank says of its live parameters."""
    return f"live-{weights[0]}-{weights[1]}" if weights else "mixture"


def end_join(engine: Engine) -> tuple[Engine, JoinReport]:
    """Everybody is in the group."""
    assert engine.work is not None
    call = engine.work.call
    assert isinstance(call, Join)
    ranks = tuple(range(call.rank_offset, call.rank_offset + engine.member.ranks))
    return replace(engine, fence=engine.fence.join_done(), work=None), JoinReport(ranks=ranks)


def end_receive(engine: Engine, digest: str) -> tuple[Engine, ReceiveReport]:
    """Everything that was sent has arrived."""
    assert engine.work is not None
    call = engine.work.call
    assert isinstance(call, Receive)
    if engine.corrupts:
        digest = f"damaged {digest}"
    arrived = (call.version, digest)
    fence = engine.fence.receive_done()
    done = replace(engine, fence=fence, work=None, corrupts=False)
    done = replace(done, beside=arrived) if call.staged else replace(done, weights=arrived)
    return done, _received(call.version, digest, arrived)


def end_borrow(engine: Engine, weights: Weights) -> tuple[Engine, ReceiveReport]:
    """The lender has given everything."""
    assert engine.work is not None
    call = engine.work.call
    assert isinstance(call, Borrow)
    done = replace(engine, fence=engine.fence.receive_done(), work=None)
    done = replace(done, beside=weights) if call.staged else replace(done, weights=weights)
    return done, _received(call.version, "", weights)


@cache
def _received(version: int, digest: str, weights: Weights) -> ReceiveReport:
    return ReceiveReport(
        version=version,
        tensors=2,
        nbytes=38,
        received_digests=(digest,),
        live_digests=(live_digest(weights),),
        receive_seconds=0.1,
        load_seconds=0.1,
    )


def break_work(engine: Engine, why: str, *, cut_off: bool) -> tuple[Engine, ProblemError]:
    """What had the turn ends half way; and its answer, which says whether another party is to blame."""
    assert engine.work is not None
    work, call = engine.work, engine.work.call
    code = ProblemCode.MEMBER_ABSENT if isinstance(call, Join) else ProblemCode.TRANSFER_FAILED
    code = ProblemCode.PEER_LOST if cut_off and not isinstance(call, Borrow) else code
    code = ProblemCode.MEMBER_ABSENT if engine.leaving and not isinstance(call, Borrow) else code
    refusal = ProblemError(code, f"{engine.member.pod_name}: {why}", member=engine.member.pod_name)
    ended = replace(engine, work=None, corrupts=False)
    if isinstance(call, Join):
        return ended, refusal
    if isinstance(call, Borrow) and call.staged:
        fence = engine.fence.staged_borrow_failed()
    else:
        touched = not (isinstance(call, Receive) and call.staged)
        fence = engine.fence.receive_failed(touched=touched, was=work.was, message=why)
    ended = replace(ended, fence=fence)
    return (replace(ended, hold_until=NEVER) if fence.state is WorkerState.SERVING else ended), refusal


def stop_lending(engine: Engine) -> Engine:
    """Whoever borrows gets no more."""
    return replace(engine, fence=engine.fence.lend_ended(), lend_until=NEVER)


def leave(engine: Engine) -> Engine:
    """It was told to end: out of the Service, and out of a transfer under way."""
    engine = replace(engine, fence=engine.fence.leaves("the pod has been told to end"))
    return end_epoch(engine, engine.fence.leaving) if engine.work is not None else engine


def end_epoch(engine: Engine, reason: str) -> Engine:
    """The group is left and everything under way ends; its answer is lost, for nobody waits for it any more."""
    if engine.work is not None:
        engine, _ = break_work(engine, "the transfer was aborted", cut_off=True)
    fence = engine.fence.aborted(reason)
    engine = replace(stop_lending(engine), fence=fence, beside=engine.beside if fence.staged else None)
    return resume(engine) if fence.whole else engine
