"""What the parties do to the world: the sync job takes steps, calls reach engines, the store is written, time passes."""

from dataclasses import replace

from fakes.explored.engine import (
    NEVER,
    Engine,
    break_work,
    end_epoch,
    handle,
    leave,
    needs_turn,
    start_engine,
    stop_lending,
)
from fakes.explored.world import (
    TIMING,
    Answer,
    LateWrite,
    Reply,
    Request,
    Step,
    World,
    digest_of,
    make_roster,
    new_member,
)
from rolloutfleet.contract.policy import RefitPolicy
from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import RefitView
from rolloutfleet.contract.worker import Join, Receive
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol import machine as protocol
from rolloutfleet_sync.protocol.commands import (
    CallWorker,
    CancelCalls,
    Command,
    PublishStatus,
    ReadStatus,
    WriteCommit,
    WriteRecord,
)
from rolloutfleet_sync.protocol.model import Identity, initial_state
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.view import view_refit


class Machine:
    """The state machine under exploration; a mutant replaces the step."""

    step: Step = staticmethod(protocol.step)


def make_world(engines: int, policy: RefitPolicy, *, calibrated: bool = True) -> World:
    """A fleet whose engines are up and whose sync job has just started."""
    pods = tuple(start_engine(new_member(each, each + 1), each + 1, calibrated=calibrated) for each in range(engines))
    state = initial_state(Identity("f", "ns", "fleet-uid", "model"), policy, TIMING)
    world = World(state, 0.0, pods, policy, names=engines, roster=make_roster(pods))
    return start_sync(world)


def start_sync(world: World) -> World:
    """A sync job that knows nothing, and has been told who is there."""
    state = initial_state(world.state.identity, world.policy, TIMING)
    world = replace(world, state=state, writes=(), reads=0, unpublished=False, restarts=world.restarts + 1)
    world = apply(world, events.Tick())
    assert world.roster is not None
    return replace(apply(world, events.RosterChanged(world.roster)), roster_told=True)


def change_engine(world: World, engine: Engine, pod_uid: str | None = None) -> World:
    uid = engine.uid if pod_uid is None else pod_uid
    return replace(world, engines=tuple(engine if each.uid == uid else each for each in world.engines))


# The sync job.


def apply(world: World, event: events.Event) -> World:
    """The sync job hears of the event, and of the time where something was due; ProblemError when it refuses."""
    world = _step(world, event)
    for _ in range(50):
        if protocol.next_wakeup(world.state) > world.now:
            return world
        world = _step(world, events.Tick())
    return replace(world, doubts=(*world.doubts, "the sync job wakes without end"))


def _step(world: World, event: events.Event) -> World:
    state, commands = Machine.step(world.state, event, world.now)
    world = replace(world, state=state)
    for command in commands:
        world = _execute(world, command)
    return world


def _execute(world: World, command: Command) -> World:
    match command:
        case CallWorker():
            return replace(world, requests=(*world.requests, Request(command, world.now + command.seconds)))
        case CancelCalls(numbers):
            return _cancel(world, frozenset(numbers))
        case WriteRecord():
            return replace(world, writes=(*world.writes, command))
        case ReadStatus():
            return replace(world, reads=world.reads + 1)
        case PublishStatus():
            return replace(world, unpublished=True)
    raise AssertionError(f"unknown command {command}")


def _cancel(world: World, numbers: frozenset[int]) -> World:
    """Connections are closed; what the network had kept back may arrive all the same."""
    requests = tuple(
        replace(request, orphan=True) if request.command.call in numbers else request
        for request in world.requests
        if request.command.call not in numbers or _acts_later(world, request)
    )
    replies = tuple(reply for reply in world.replies if reply.event.call not in numbers)
    return replace(world, requests=requests, replies=replies)


def _acts_later(world: World, request: Request) -> bool:
    """Whether the call may be carried out although nobody waits for it."""
    return request.command.message is not None and (request.held or is_blocked(world, request))


def hear_reply(world: World, reply: Reply) -> World:
    """An answer reaches the sync job."""
    return apply(replace(world, replies=tuple(each for each in world.replies if each is not reply)), reply.event)


def add_reply(world: World, number: int, pod_uid: str, answer: object, expires: float = NEVER) -> World:
    """Put an answer on its way, if the sync job still waits for one."""
    if number not in world.state.calls:
        return world
    event: Answer
    if isinstance(answer, ProblemError):
        event = events.CallFailed(number, answer.problem, refused=True)
    else:
        event = events.CallAnswered(number, answer)  # type: ignore[arg-type]
    return replace(world, replies=(*world.replies, Reply(event, pod_uid, expires)))


def lose(world: World, command: CallWorker, code: ProblemCode = ProblemCode.MEMBER_ABSENT) -> World:
    """The connection of a call breaks."""
    if command.call not in world.state.calls:
        return world
    problem = Problem(code=code, message=f"{command.pod_name} did not answer", member=command.pod_name)
    return replace(
        world, replies=(*world.replies, Reply(events.CallFailed(command.call, problem, False), command.pod_uid, NEVER))
    )


# The engines.


def is_blocked(world: World, request: Request) -> bool:
    """Whether the call waits for its turn at the engine."""
    engine = world.at(request.command.address)
    message = request.command.message
    return engine is not None and engine.work is not None and message is not None and needs_turn(message)


def deliver(world: World, request: Request, *, copy: bool = False) -> World:
    """A call reaches whoever is at its address; a copy of it may stay on the way."""
    left = tuple(each for each in world.requests if each is not request)
    if copy:
        left = (*left, replace(request, held=True, orphan=True))
    world = replace(world, requests=left)
    command = request.command
    engine = world.at(command.address)
    number = 0 if request.orphan else command.call
    if engine is None:
        return world if request.orphan else lose(world, command)
    if command.message is None:
        return add_reply(world, command.call, command.pod_uid, engine.report(world.now), request.expires)
    work, epoch = engine.work, engine.fence.epoch
    after, answer = handle(engine, command.message, number, world.now)
    world = change_engine(world, after)
    if after.fence.epoch != epoch or (work is not None and after.work is None):
        world = _leave_groups(world, after, work.number if work else 0)
    if answer is None:
        return world
    return add_reply(world, number, command.pod_uid, answer, request.expires)


def _leave_groups(world: World, engine: Engine, ended: int) -> World:
    """An engine has gone on to another epoch: whoever counted on it in the one before does so in vain."""
    if ended and engine.work is None:
        refusal = ProblemError(ProblemCode.PEER_LOST, f"{engine.member.pod_name}: the transfer was aborted")
        world = add_reply(world, ended, engine.uid, refusal)
    return break_groups(world, engine.uid, before=engine.fence.epoch)


def break_groups(world: World, pod_uid: str, before: float = NEVER) -> World:
    """The sockets of a member close in every group of an epoch before this one."""
    groups = tuple(
        replace(group, gone=group.gone | {pod_uid}, broken=group.broken or pod_uid not in group.ended)
        if group.epoch < before and pod_uid in group.members
        else group
        for group in world.groups
    )
    return replace(world, groups=groups)


def finish_work(world: World, engine: Engine, after: Engine, answer: object) -> World:
    """An engine's work has come to its end, whole or not."""
    assert engine.work is not None
    return add_reply(change_engine(world, after), engine.work.number, engine.uid, answer)


def give_up_work(world: World, engine: Engine, why: str, *, cut_off: bool = True) -> World:
    """An engine's work ends half way: its socket closed, or its time is over."""
    work = engine.work
    assert work is not None
    after, refusal = break_work(engine, why, cut_off=cut_off)
    world = finish_work(world, engine, after, refusal)
    return break_groups(world, engine.uid) if isinstance(work.call, Receive | Join) else world


def tell_to_end(world: World, engine: Engine) -> World:
    """The kubelet sends SIGTERM; a transfer under way is broken off, and answered for."""
    work, epoch = engine.work, engine.fence.epoch
    leaving = replace(engine, fence=engine.fence.leaves("the pod has been told to end"))
    world = change_engine(world, leave(engine))
    if work is None:
        return world
    _, refusal = break_work(leaving, "the transfer was aborted", cut_off=True)
    return break_groups(add_reply(world, work.number, engine.uid, refusal), engine.uid, before=epoch + 1)


def kill(world: World, engine: Engine) -> World:
    """The process is gone, with its memory and its sockets."""
    waited = world.requests
    dead = replace(stop_lending(engine), alive=False, work=None, hold_until=NEVER, weights=None, beside=None)
    world = break_groups(change_engine(world, dead), engine.uid)
    if engine.work is not None:
        call = next((each for each in world.state.calls.values() if each.number == engine.work.number), None)
        if call is not None:
            problem = Problem(code=ProblemCode.MEMBER_ABSENT, message="connection reset", member=engine.member.pod_name)
            event = events.CallFailed(call.number, problem, refused=False)
            world = replace(world, replies=(*world.replies, Reply(event, engine.uid, NEVER)))
    assert world.requests == waited
    return world


def restart(world: World, engine: Engine) -> World:
    """Its container comes back: same pod, same address, another process."""
    number = world.names + 1
    fresh = start_engine(engine.member, number, calibrated=engine.calibrated)
    return replace(change_engine(world, fresh), names=number)


def substitute(world: World, engine: Engine, *, same_address: bool) -> World:
    """The operator puts another pod in its place; the sync job has yet to hear of it."""
    number = world.names + 1
    member = new_member(engine.member.engine, number, engine.member.address if same_address else "")
    fresh = start_engine(member, number, calibrated=engine.calibrated)
    world = replace(change_engine(world, fresh, engine.uid), names=number, roster_told=False)
    return replace(world, roster=make_roster(world.engines))


def tell_roster(world: World) -> World:
    """The sync job hears who is there now."""
    assert world.roster is not None
    return apply(replace(world, roster_told=True), events.RosterChanged(world.roster))


# The store.


def _as_stored(world: World, record: Record) -> Record:
    """What a status write of this record says, see ``summarize_status``."""
    return record.model_copy(update={"epoch": max(record.epoch, world.state.epoch)})


def store(world: World, write: WriteRecord) -> World:
    """A durable write lands."""
    record = _as_stored(world, write.record)
    published = _what_is_published(world, write)
    if published is not None:
        world = replace(world, published=world.published | {published})
    return replace(world, stored=record, revision=world.revision + 1, known_revision=world.revision + 1)


def _what_is_published(world: World, write: WriteRecord) -> tuple[int, str] | None:
    refit, version = world.state.refit, write.record.version
    if not isinstance(write, WriteCommit):
        return None
    return version, digest_of(version, refit.id if refit is not None and refit.version == version else "nobody")


def end_write(world: World, write: WriteRecord, *, stored: bool = True, known: bool = True) -> World:
    """A durable write ends: stored or not, and known to the writer or not."""
    world = replace(world, writes=tuple(each for each in world.writes if each is not write))
    if world.revision != world.known_revision:
        return start_sync(world)  # somebody else has written: this sync job ends, and starts again
    if stored:
        world = store(world, write)
    if stored and known:
        return apply(world, events.RecordWritten(write.write))
    return apply(world, events.WriteFailed(write.write, "no answer"))


def read_status(world: World) -> World:
    """The sync job reads its record."""
    world = replace(world, reads=world.reads - 1, known_revision=world.revision)
    return apply(world, events.StatusRead(world.stored))


def publish(world: World) -> World:
    """A report is written, where one is due and may be."""
    if not world.unpublished or not protocol.may_publish(world.state) or world.state.record is None:
        return world
    if world.revision != world.known_revision:
        return start_sync(world)
    record = _as_stored(world, world.state.record)
    world = replace(world, unpublished=False)
    if record == world.stored:
        return world
    return replace(world, stored=record, revision=world.revision + 1, known_revision=world.revision + 1)


def restart_sync(world: World, *, landed: bool, late: bool = False) -> World:
    """The sync job's process ends and starts again; a write under way had landed, or not, or lands later."""
    for write in world.writes[:1]:
        if landed:
            world = store(world, write)
        elif late:
            published = _what_is_published(world, write)
            late_write = LateWrite(_as_stored(world, write.record), world.revision, published)
            world = replace(world, late_writes=(late_write,))
    requests = tuple(replace(each, orphan=True) for each in world.requests if _acts_later(world, each))
    return start_sync(replace(world, requests=requests, replies=()))


def land_late_write(world: World, late: LateWrite) -> World:
    """A write of a sync job that is gone reaches the store, unless somebody has written since."""
    world = replace(world, late_writes=())
    if world.revision != late.revision:
        return world
    if late.published is not None:
        world = replace(world, published=world.published | {late.published})
    return replace(world, stored=late.record, revision=world.revision + 1)


# The trainer.


def view(world: World) -> RefitView | None:
    """The trainer's refit as the sync job shows it; None when it does not know it."""
    trainer = world.trainer
    if trainer is None or not trainer.refit:
        return None
    try:
        return view_refit(world.state, trainer.refit, world.now)
    except ProblemError:
        return None


# Time.


def next_moment(world: World) -> float:
    """When something is due next."""
    times = [protocol.next_wakeup(world.state)]
    times += [request.expires for request in world.requests if not request.orphan]
    times += [reply.expires for reply in world.replies]
    for engine in world.engines:
        if engine.alive:
            times += [engine.hold_until, engine.lend_until, engine.stale_until]
            if engine.work is not None:
                times.append(engine.work.deadline)
    return min(times)


def let_engines_notice(world: World) -> World:
    """Deadlines that engines keep by themselves."""
    for engine in world.engines:
        if not engine.alive:
            continue
        if engine.work is not None and engine.work.deadline <= world.now:
            world = give_up_work(world, engine, "no answer in time", cut_off=False)
            engine = next(each for each in world.engines if each.uid == engine.uid)
        if engine.stale_until <= world.now:
            engine = replace(engine, fence=engine.fence.stale_ends(), stale_until=NEVER)
            world = change_engine(world, engine)
        if engine.lend_until <= world.now:
            engine = stop_lending(engine)
            world = change_engine(world, engine)
        if engine.hold_until <= world.now:
            after = end_epoch(replace(engine, hold_until=NEVER), "the sync job let it pass its deadline")
            world = break_groups(change_engine(world, after), engine.uid)
    return world


def expire_calls(world: World) -> World:
    """The sync job stops waiting for what has taken too long."""
    pending = {call.number: call for call in world.state.calls.values()}
    late = [each for each in world.requests if not each.orphan and each.expires <= world.now]
    answered = {reply.event.call for reply in world.replies if reply.expires <= world.now}
    requests = tuple(
        replace(each, orphan=True) if each in late else each
        for each in world.requests
        if each not in late or _acts_later(world, each)
    )
    replies = tuple(each for each in world.replies if each.event.call not in answered)
    world = replace(world, requests=requests, replies=replies)
    commands = [each.command for each in late if each.command.call in pending]
    for command in commands:
        world = _fail_late(world, command.call, command.pod_name)
    for number in sorted(answered & pending.keys()):
        world = _fail_late(world, number, "a member")
    return world


def _fail_late(world: World, number: int, name: str) -> World:
    problem = Problem(code=ProblemCode.DEADLINE_EXCEEDED, message=f"{name} did not answer in time", member=name)
    return apply(world, events.CallFailed(number, problem, refused=False))


def pass_time(world: World) -> World:
    """Time goes on to the next moment at which something is due; whoever lives renews its lease."""
    world = publish(world)
    moment = next_moment(world)
    if moment == NEVER:
        return world
    world = let_engines_notice(replace(world, now=max(moment, world.now)))
    trainer, session = world.trainer, world.state.session
    if trainer is not None and trainer.alive and session is not None and session.id == trainer.session:
        world = _step(world, events.SessionRenewed(session.id))
    world = expire_calls(world)
    return apply(world, events.Tick())
