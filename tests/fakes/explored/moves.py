"""What can happen next: everything that a cluster does by itself, and, as long as there are faults left, everything that goes wrong.

The network delivers what is on its way, in any order, before time passes. A message that takes longer than that is a fault (``is kept
back``), and so is a party that takes longer over its part (``stalls``). A report is answered at once unless it is kept back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fakes.explored.acting import (
    apply,
    change_engine,
    deliver,
    end_write,
    finish_work,
    give_up_work,
    hear_reply,
    is_blocked,
    kill,
    land_late_write,
    lose,
    pass_time,
    read_status,
    restart,
    restart_sync,
    substitute,
    tell_roster,
    tell_to_end,
    view,
)
from fakes.explored.engine import Engine, end_borrow, end_join, end_receive
from fakes.explored.world import MANIFEST, Group, Reply, Request, Trainer, World, digest_of
from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import (
    OpenSession,
    Phase,
    RequestRefit,
    TrainerFailed,
    TrainerJoined,
    TrainerPrepared,
    TrainerSent,
)
from rolloutfleet.contract.worker import Borrow, Join, Receive, Rendezvous
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.model import Verb

RENDEZVOUS = Rendezvous(host="10.1.1.1", port=29500)


@dataclass(frozen=True, slots=True)
class Move:
    """One thing that can happen, and what it costs of the faults that are left."""

    name: str
    make: Callable[[], World]
    cost: int = 0


def next_moves(world: World) -> list[Move]:
    """Every move of this moment, the ordinary ones first; the first of them is what happens when nothing goes wrong."""
    urgent = list(_urgent(world))
    moves = urgent or [Move("time passes", lambda: pass_time(world))]
    moves += _unhurried(world)
    if world.faults:
        moves += _faults(world)
    return moves


def calm_move(world: World) -> Move:
    """What happens next when nothing goes wrong any more: the network gives back what it kept, nobody stalls."""
    for move in _urgent(world):
        return move
    for move in _releases(world):
        return move
    for engine in world.engines:
        if engine.leaving and not engine.owes_an_end:
            return Move(f"{engine.member.pod_name} ends", lambda engine=engine: kill(world, engine))
    if not world.roster_told:
        return Move("the roster arrives", lambda: tell_roster(world))
    return Move("time passes", lambda: pass_time(world))


def take(world: World, move: Move) -> World:
    """The moment after."""
    after = move.make()
    return replace(after, faults=after.faults - move.cost) if move.cost else after


# What cannot wait.


def _urgent(world: World) -> Iterator[Move]:
    report = next((each for each in world.requests if each.command.verb is Verb.REPORT and not each.held), None)
    if report is not None:
        yield Move(f"{report.command.pod_name} reports", lambda: _report(world, report))
        return
    if world.reads:
        yield Move("the status is read", lambda: read_status(world))
    for reply in world.replies:
        if not reply.held:
            yield Move(f"{_name(reply, world)} is heard", lambda reply=reply: hear_reply(world, reply))
    for request in world.requests:
        if not request.held and not is_blocked(world, request):
            yield Move(f"{_call(request)} arrives", lambda request=request: deliver(world, request))
    for write in world.writes[:1]:  # one at a time, in order
        yield Move(f"{type(write).__name__} succeeds", lambda write=write: end_write(world, write))
    yield from _trainer_moves(world)
    for engine in world.engines:
        yield from _work_moves(world, engine)


def _report(world: World, request: Request) -> World:
    asked = deliver(world, request)
    reply = next((each for each in asked.replies if each.event.call == request.command.call), None)
    return hear_reply(asked, reply) if reply is not None else asked


def _call(request: Request) -> str:
    return f"{request.command.verb.value or 'report'} to {request.command.pod_name}"


def _name(reply: Reply, world: World) -> str:
    call = world.state.calls.get(reply.event.call)
    verb = (call.verb.value or "report") if call is not None else "a call"
    kind = "an answer" if isinstance(reply.event, events.CallAnswered) else "a failure"
    return f"{kind} of {reply.pod_uid} to {verb}"


def _work_moves(world: World, engine: Engine) -> Iterator[Move]:
    work = engine.work
    if work is None or work.stalled or not engine.alive:
        return
    name = engine.member.pod_name
    if isinstance(work.call, Receive):
        group = world.group(work.call.epoch)
        if group is None or group.broken:
            yield Move(
                f"the transfer of {name} breaks", lambda: give_up_work(world, engine, "connection reset by peer")
            )
        elif group.flowing:
            yield Move(f"the transfer of {name} ends", lambda: _arrive(world, engine, group))
    elif isinstance(work.call, Borrow):
        port = work.call.rendezvous.port
        donor = next((each for each in world.engines if 1024 + each.number == port and each.alive), None)
        if donor is None or not donor.fence.lending or donor.weights is None:
            yield Move(f"the loan of {name} breaks", lambda: give_up_work(world, engine, "the lender is gone"))
        else:
            yield Move(f"the loan of {name} ends", lambda: _end_loan(world, engine, donor))


def _arrive(world: World, engine: Engine, group: Group) -> World:
    assert engine.work is not None
    call = engine.work.call
    assert isinstance(call, Receive)
    assert world.trainer is not None
    after, report = end_receive(engine, digest_of(world.trainer.version, world.trainer.refit))
    world = finish_work(world, engine, after, report)
    ended = group.ended | {engine.uid}
    return _change_group(world, replace(group, ended=ended, flowing=ended != set(group.members)))


def _end_loan(world: World, engine: Engine, donor: Engine) -> World:
    assert donor.weights is not None
    after, report = end_borrow(engine, donor.weights)
    world = finish_work(world, engine, after, report)
    return change_engine(world, replace(donor, fence=donor.fence.lend_ended(), lend_until=float("inf")))


def _change_group(world: World, group: Group) -> World:
    return replace(world, groups=tuple(group if each.epoch == group.epoch else each for each in world.groups))


# The trainer.


def _trainer_moves(world: World) -> Iterator[Move]:
    trainer = world.trainer
    if trainer is None or not trainer.alive or trainer.stalled:
        return
    if trainer.words:
        yield Move(f"the trainer's {type(trainer.words[0]).__name__} is heard", lambda: _hear_trainer(world, trainer))
        return
    if not trainer.refit:
        if world.refits_left and world.state.session is not None and world.state.session.id == trainer.session:
            yield Move("the trainer asks for a refit", lambda: request_refit(world))
        return
    yield from _follow(world, trainer)


def _follow(world: World, trainer: Trainer) -> Iterator[Move]:
    shown = view(world)
    session = world.state.session
    held = session is not None and session.id == trainer.session
    if shown is None or not held or shown.phase in {Phase.COMPLETE, Phase.FAILED}:
        yield Move("the trainer's refit has ended", lambda: _end_trainers_refit(world, trainer))
        return
    outdated = {trainer.joining, trainer.sending} - {0, shown.epoch}
    if shown.phase is Phase.ABORTING or outdated:
        if trainer.joining or trainer.sending:
            freed = replace(trainer, joining=0, sending=0)
            yield Move("the trainer stops", lambda: _break_all(replace(world, trainer=freed)))
        return
    group = world.group(trainer.sending) if trainer.sending else None
    if trainer.joining:
        joined = _joined(world, trainer.joining)
        if joined is not None:
            yield Move("the group forms", lambda: _form(world, trainer, joined))
        elif shown.join is None or shown.join.epoch != trainer.joining:
            yield Move("the trainer stops", lambda: replace(world, trainer=replace(trainer, joining=0)))
    elif group is not None:
        yield from _send(world, trainer, group)
    elif shown.join is not None and ("join", shown.epoch) not in trainer.done:
        done = trainer.done | {("join", shown.epoch)}
        yield Move(
            "the trainer joins", lambda: replace(world, trainer=replace(trainer, joining=shown.epoch, done=done))
        )
    elif shown.prepare is not None and ("prepare", shown.epoch) not in trainer.done:
        word = events.TrainerHasPrepared(trainer.refit, TrainerPrepared(epoch=shown.epoch))
        yield Move("the trainer prepares", lambda: _say(world, trainer, word, "prepare", shown.epoch))
    elif shown.send is not None and ("send", shown.epoch) not in trainer.done:
        yield Move("the trainer sends", lambda: _begin_sending(world, trainer, shown.epoch))


def _joined(world: World, epoch: int) -> tuple[Engine, ...] | None:
    """Those that wait for each other in this epoch, when nobody is missing."""
    waiting = tuple(
        each
        for each in world.engines
        if each.work is not None and isinstance(each.work.call, Join) and each.work.call.epoch == epoch
    )
    if not waiting or any(each.work is None or each.work.stalled for each in waiting):
        return None
    call = waiting[0].work.call if waiting[0].work is not None else None
    assert isinstance(call, Join)
    return waiting if len(waiting) == call.world_size - call.trainer_ranks else None


def _form(world: World, trainer: Trainer, joined: tuple[Engine, ...]) -> World:
    for engine in joined:
        after, report = end_join(engine)
        world = finish_work(world, engine, after, report)
    epoch = trainer.joining
    members = tuple(each.uid for each in sorted(joined, key=_offset))
    kept = tuple(group for group in world.groups if epoch - 2 < group.epoch != epoch)
    word = events.TrainerHasJoined(trainer.refit, TrainerJoined(epoch=epoch))
    said = replace(trainer, joining=0, words=(*trainer.words, word))
    return replace(world, groups=(*kept, Group(epoch, members)), trainer=said)


def _offset(engine: Engine) -> int:
    assert engine.work is not None
    assert isinstance(engine.work.call, Join)
    return engine.work.call.rank_offset


def _begin_sending(world: World, trainer: Trainer, epoch: int) -> World:
    group = world.group(epoch)
    assert group is not None
    fresh = replace(group, flowing=False, broken=bool(group.gone), ended=frozenset())
    sending = replace(trainer, sending=epoch, done=trainer.done | {("send", epoch)})
    return _change_group(replace(world, trainer=sending), fresh)


def _send(world: World, trainer: Trainer, group: Group) -> Iterator[Move]:
    if group.broken:
        alive = {each.uid for each in world.engines if each.alive}
        ranks = tuple(rank for rank, uid in enumerate(group.members, 1) if uid not in alive)
        message = TrainerFailed(epoch=group.epoch, message="connection reset", peer_lost=True, lost_ranks=ranks)
        failed = events.TrainerHasFailed(trainer.refit, message)
        yield Move("the trainer's transfer breaks", lambda: _say(replace(world), replace(trainer, sending=0), failed))
    elif not group.flowing and not group.ended:
        at_it = {
            each.uid
            for each in world.engines
            if each.work is not None
            and isinstance(each.work.call, Receive)
            and each.work.call.epoch == group.epoch
            and not each.work.stalled
        }
        if at_it == set(group.members):
            yield Move("the bytes flow", lambda: _change_group(world, replace(group, flowing=True)))
    else:
        digest = digest_of(trainer.version, trainer.refit)
        keys = ("placed",) if trainer.done & {("prepare", group.epoch)} else ("",)
        digests = dict.fromkeys((*keys, "placed", ""), digest)
        sent = TrainerSent(epoch=group.epoch, tensors=2, nbytes=MANIFEST.nbytes, digests=digests)
        word = events.TrainerHasSent(trainer.refit, sent)
        yield Move("the trainer has sent", lambda: _say(world, replace(trainer, sending=0), word))


def _say(world: World, trainer: Trainer, word: events.Event, step: str = "", epoch: int = 0) -> World:
    done = trainer.done | {(step, epoch)} if step else trainer.done
    return replace(world, trainer=replace(trainer, done=done, words=(*trainer.words, word)))


def _hear_trainer(world: World, trainer: Trainer) -> World:
    world = replace(world, trainer=replace(trainer, words=trainer.words[1:]))
    try:
        return apply(world, trainer.words[0])
    except ProblemError:
        return world


def _end_trainers_refit(world: World, trainer: Trainer) -> World:
    idle = replace(trainer, refit="", version=0, joining=0, sending=0, done=frozenset(), words=())
    return _break_all(replace(world, trainer=idle)) if trainer.sending else replace(world, trainer=idle)


def _break_all(world: World) -> World:
    groups = tuple(
        group if group.ended >= set(group.members) else replace(group, broken=True) for group in world.groups
    )
    return replace(world, groups=groups)


def open_session(world: World, *, take_over: bool = False) -> World:
    """A trainer comes; the world without it where the sync job refuses."""
    number = world.names + 1
    session = f"s{number}"
    request = OpenSession(trainer="trainer", rendezvous=RENDEZVOUS, devices=("cpu",), take_over=take_over)
    try:
        opened = apply(world, events.SessionOpened(session, request))
    except ProblemError:
        return world
    return _break_all(replace(opened, names=number, trainer=Trainer(session)))


def request_refit(world: World) -> World:
    """The trainer asks for the next version; the world without it where the sync job refuses."""
    trainer = world.trainer
    assert trainer is not None
    number = world.names + 1
    version = max(max(each for each, _ in world.published), world.state.version) + 1
    message = RequestRefit(version=version, manifest=MANIFEST)
    event = events.RefitRequested(f"r{number}", trainer.session, message, MANIFEST.digest())
    asking = replace(world, names=number, refits_left=max(world.refits_left - 1, 0))
    try:
        asked = apply(asking, event)
    except ProblemError:
        return asking
    return replace(asked, trainer=Trainer(trainer.session, f"r{number}", version))


# What may happen at any later moment.


def _unhurried(world: World) -> Iterator[Move]:
    if not world.roster_told:
        yield Move("the roster arrives", lambda: tell_roster(world))
    yield from _releases(world)
    for engine in world.engines:
        name = engine.member.pod_name
        if engine.leaving:
            yield Move(f"{name} ends", lambda engine=engine: kill(world, engine))
        if not engine.alive:
            yield Move(f"{name} restarts", lambda engine=engine: restart(world, engine))
            yield Move(f"{name} is replaced", lambda engine=engine: substitute(world, engine, same_address=False))
            if world.roster_told:
                yield Move(
                    f"{name} is replaced at its address",
                    lambda engine=engine: substitute(world, engine, same_address=True),
                )


def _releases(world: World) -> Iterator[Move]:
    for reply in world.replies:
        if reply.held:
            yield Move(f"{_name(reply, world)} is heard late", lambda reply=reply: hear_reply(world, reply))
    for request in world.requests:
        if request.held and not is_blocked(world, request):
            yield Move(f"{_call(request)} arrives late", lambda request=request: deliver(world, request))
            if request.orphan:
                left = tuple(each for each in world.requests if each is not request)
                yield Move(f"{_call(request)} never arrives", lambda left=left: replace(world, requests=left))
    for engine in world.engines:
        if engine.work is not None and engine.work.stalled:
            going = replace(engine, work=replace(engine.work, stalled=False))
            yield Move(f"{engine.member.pod_name} goes on", lambda going=going: change_engine(world, going))
        if not engine.cache_answer:
            willing = replace(engine, cache_answer=True)
            yield Move(
                f"the cache of {engine.member.pod_name} obeys again",
                lambda willing=willing: change_engine(world, willing),
            )
    trainer = world.trainer
    if trainer is not None and trainer.stalled:
        yield Move("the trainer goes on", lambda: replace(world, trainer=replace(trainer, stalled=False)))
    for late in world.late_writes:
        yield Move("a late write lands", lambda late=late: land_late_write(world, late))


# What goes wrong.


def _faults(world: World) -> Iterator[Move]:
    yield from _network_faults(world)
    yield from _engine_faults(world)
    yield from _trainer_faults(world)
    yield from _sync_faults(world)


def _network_faults(world: World) -> Iterator[Move]:
    for request in world.requests:
        if request.held:
            continue
        left = tuple(each for each in world.requests if each is not request)
        held = tuple(replace(each, held=True) if each is request else each for each in world.requests)
        yield Move(
            f"{_call(request)} is lost",
            lambda left=left, request=request: lose(replace(world, requests=left), request.command),
            1,
        )
        yield Move(f"{_call(request)} is kept back", lambda held=held: replace(world, requests=held), 1)
        if request.command.message is not None and not is_blocked(world, request):
            yield Move(f"{_call(request)} arrives twice", lambda request=request: deliver(world, request, copy=True), 1)
    for reply in world.replies:
        if reply.held or isinstance(reply.event, events.CallFailed):
            continue
        kept = tuple(replace(each, held=True) if each is reply else each for each in world.replies)
        yield Move(f"{_name(reply, world)} is lost", lambda reply=reply: _lose_reply(world, reply), 1)
        yield Move(f"{_name(reply, world)} is kept back", lambda kept=kept: replace(world, replies=kept), 1)


def _lose_reply(world: World, reply: Reply) -> World:
    call = world.state.calls[reply.event.call]
    record = world.state.members.get(call.pod_uid)
    name = record.pod_name if record is not None else call.pod_uid

    problem = Problem(code=ProblemCode.MEMBER_ABSENT, message=f"{name} did not answer", member=name)
    failed = replace(reply, event=events.CallFailed(call.number, problem, refused=False))
    return replace(world, replies=tuple(failed if each is reply else each for each in world.replies))


def _engine_faults(world: World) -> Iterator[Move]:
    for engine in world.engines:
        name = engine.member.pod_name
        if not engine.alive:
            continue
        yield Move(f"{name} dies", lambda engine=engine: kill(world, engine), 1)
        if not engine.leaving:
            yield Move(f"{name} is told to end", lambda engine=engine: tell_to_end(world, engine), 1)
        if engine.cache_answer and world.active is not None:
            stubborn = replace(engine, cache_answer=False)
            yield Move(
                f"the cache of {name} will not be reset", lambda stubborn=stubborn: change_engine(world, stubborn), 1
            )
        work = engine.work
        if work is None:
            continue
        if not work.stalled:
            stalled = replace(engine, work=replace(work, stalled=True))
            yield Move(f"{name} stalls", lambda stalled=stalled: change_engine(world, stalled), 1)
        if isinstance(work.call, Receive) and not engine.corrupts:
            corrupt = replace(engine, corrupts=True)
            yield Move(f"what {name} receives is damaged", lambda corrupt=corrupt: change_engine(world, corrupt), 1)


def _trainer_faults(world: World) -> Iterator[Move]:
    trainer = world.trainer
    if trainer is None or not trainer.alive:
        return
    dead = replace(trainer, alive=False, words=())
    yield Move("the trainer dies", lambda: _break_all(replace(world, trainer=dead)), 1)
    if trainer.refit:
        yield Move("another trainer takes over", lambda: open_session(world, take_over=True), 1)
        if not trainer.stalled:
            yield Move("the trainer stalls", lambda: replace(world, trainer=replace(trainer, stalled=True)), 1)


def _sync_faults(world: World) -> Iterator[Move]:
    yield Move("the sync job restarts", lambda: restart_sync(world, landed=False), 1)
    if world.reads:
        unread = replace(world, reads=world.reads - 1)
        yield Move("the status cannot be read", lambda: apply(unread, events.StatusUnreadable("no answer")), 1)
    for write in world.writes[:1]:  # one at a time, in order
        kind = type(write).__name__
        yield Move(f"the sync job restarts after {kind}", lambda: restart_sync(world, landed=True), 1)
        yield Move(
            f"the sync job restarts before {kind} lands", lambda: restart_sync(world, landed=False, late=True), 1
        )
        yield Move(f"{kind} fails", lambda write=write: end_write(world, write, stored=False), 1)
        yield Move(f"{kind} succeeds unseen", lambda write=write: end_write(world, write, known=False), 1)
