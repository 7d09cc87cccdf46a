"""The sync job's protocol in a world of fakes: calls, answers and writes are delivered when the test says so, or never."""

import asyncio
import weakref
from dataclasses import dataclass, field
from typing import Any

from fakes.engine import FakeEngine
from rolloutfleet.contract.adapter import AdapterSpec, manifest_key
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.policy import CachePolicy, RefitDeadlines, RefitPolicy, Transport
from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import (
    OpenSession,
    Phase,
    RefitView,
    RequestRefit,
    TrainerFailed,
    TrainerJoined,
    TrainerPrepared,
    TrainerSent,
)
from rolloutfleet.contract.worker import Receive, ReceiveReport, Rendezvous
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.commands import CallWorker, CancelCalls, ReadStatus, WriteCommit, WriteRecord
from rolloutfleet_sync.protocol.machine import next_wakeup, step
from rolloutfleet_sync.protocol.model import Identity, Timing, Verb, initial_state
from rolloutfleet_sync.protocol.record import Record
from rolloutfleet_sync.protocol.view import view_refit

DEADLINES = RefitDeadlines(
    forming_seconds=20,
    preparing_seconds=10,
    pausing_seconds=10,
    transferring_seconds=30,
    verifying_seconds=10,
    committing_seconds=10,
    resuming_seconds=10,
)
MANIFEST = Manifest(
    tensors=(TensorSpec(name="a", dtype="float32", shape=(4, 2)), TensorSpec(name="b", dtype="bfloat16", shape=(3,)))
)


def digest_of(version: int, attempt: str) -> str:
    return f"bytes-of-{version}-{attempt}"


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop for the engines whose clock is the simulation's."""

    now = 0.0

    def time(self) -> float:
        return self.now


async def _breathe() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@dataclass
class Simulation:
    """One sync job, its store, its engines and one trainer's words."""

    engines: int = 2
    ranks: int = 1
    policy: RefitPolicy = field(
        default_factory=lambda: RefitPolicy(transport=Transport.GLOO, cache=CachePolicy.RESET, deadlines=DEADLINES)
    )
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self):
        self.now = 0.0
        self._loop = SimulatedLoop()
        weakref.finalize(self, self._loop.close)
        self._handling: list[tuple[CallWorker, FakeEngine, asyncio.Task[Any]]] = []
        self.stored = Record()
        self.published = {0: ""}
        self.received: set[tuple[str, str, int, str]] = set()
        self.sent: dict[tuple[int, int], str] = {}
        self.layouts: tuple[str, ...] = ()
        """Digests of the workers' layouts, once the trainer has prepared."""
        self.calls: list[CallWorker] = []
        self.answers: list[events.Event] = []
        self.transfers: list[tuple[CallWorker, FakeEngine]] = []
        self.writes: list[WriteRecord] = []
        self.reads = 0
        self.commands: list[Any] = []
        self.cut: set[str] = set()
        self._count = 0
        self.workers: dict[int, FakeEngine] = {}
        for engine in range(self.engines):
            self.workers[engine] = self.new_engine(engine)
        self.state = initial_state(Identity("f", "ns", "fleet-uid", "model"), self.policy, self.timing)

    def new_engine(self, engine: int) -> FakeEngine:
        number = self.fresh()
        member = Member(
            engine=engine,
            pod_name=f"f-{engine}-0-{number}",
            pod_uid=f"uid-{number}",
            address=f"10.0.0.{number}",
            ranks=self.ranks,
        )
        return FakeEngine(member, instance=f"i{number}")

    def fresh(self) -> int:
        self._count += 1
        return self._count

    @property
    def roster(self) -> Roster:
        members = tuple(self.workers[engine].member for engine in sorted(self.workers))
        return Roster(fleet="f", fleet_uid="fleet-uid", engines=self.engines, members=members)

    def find(self, pod_uid: str) -> FakeEngine | None:
        return next((w for w in self.workers.values() if w.member.pod_uid == pod_uid), None)

    def apply(self, event: events.Event) -> None:
        self._step(event)
        if next_wakeup(self.state) <= self.now:
            self._step(events.Tick())

    def _step(self, event: events.Event) -> None:
        self.state, commands = step(self.state, event, self.now)
        for command in commands:
            self.commands.append(command)
            match command:
                case CallWorker():
                    self.calls.append(command)
                case CancelCalls(numbers):
                    self.calls = [c for c in self.calls if c.call not in numbers]
                case WriteRecord():
                    self.writes.append(command)
                    if isinstance(command, WriteCommit):
                        assert self.state.refit is not None
                        self.committing = self.state.refit
                case ReadStatus():
                    self.reads += 1

    def start(self) -> None:
        """Bring a fresh sync job up against what is stored and who is there."""
        self.apply(events.Tick())
        self.read_status()
        self.apply(events.RosterChanged(self.roster))

    def restart_sync(self) -> None:
        """The sync job's container ends and comes back: everything but the store is gone."""
        self.calls, self.answers, self.writes, self.reads = [], [], [], 0
        self.state = initial_state(self.state.identity, self.policy, self.timing)
        self.start()

    def read_status(self) -> None:
        if self.reads:
            self.reads -= 1
            self.apply(events.StatusRead(self.stored))

    def advance(self, seconds: float) -> None:
        """Pass time as the process does: a tick whenever one is due."""
        target = self.now + seconds
        for _ in range(2000):
            due = max(next_wakeup(self.state), self.now)
            if due > target:
                break
            self.now = due
            self._run_engines()
            self.apply(events.Tick())
        else:
            raise AssertionError(f"the protocol wakes without end at {self.now}")
        self.now = target
        self._run_engines()

    def deliver_call(self, index: int = 0) -> None:
        """Let one call reach its engine; its answer waits to be delivered."""
        command = self.calls.pop(index)
        engine = self.find(command.pod_uid)
        if engine is None or engine.name in self.cut:
            self.answers.append(self.no_answer(command))
        elif command.message is None:
            self.answers.append(events.CallAnswered(command.call, engine.report()))
        else:
            self._handling.append((command, engine, self._loop.create_task(engine.handle(command.message))))
            self._run_engines()
            if command.verb is Verb.RECEIVE and any(handled[0] is command for handled in self._handling):
                self.transfers.append((command, engine))

    def _run_engines(self) -> None:
        """Let the engines work until each of them waits for something; what they have answered waits to be delivered."""
        self._loop.now = self.now
        self._loop.run_until_complete(_breathe())
        handling, self._handling = self._handling, []
        for command, engine, task in handling:
            if task.done():
                self.transfers = [transfer for transfer in self.transfers if transfer[0] is not command]
                self.answers.append(self._answer(command, engine, task))
            else:
                self._handling.append((command, engine, task))

    def _answer(self, command: CallWorker, engine: FakeEngine, task: "asyncio.Task[Any]") -> events.Event:
        error = task.exception()
        if self.find(command.pod_uid) is not engine:
            return self.no_answer(command)
        if isinstance(error, ProblemError):
            return events.CallFailed(command.call, error.problem, refused=True)
        report = task.result()
        if isinstance(report, ReceiveReport):
            self.received.update(
                (engine.member.pod_uid, engine.instance, report.version, digest) for digest in report.received_digests
            )
        return events.CallAnswered(command.call, report)

    def no_answer(self, command: CallWorker) -> events.CallFailed:
        message = f"{command.pod_name} did not answer {command.verb.value or 'report'}: connection refused"
        problem = Problem(code=ProblemCode.MEMBER_ABSENT, message=message, member=command.pod_name)
        return events.CallFailed(command.call, problem, refused=False)

    def end_transfer(self, index: int = 0, *, whole: bool = True) -> None:
        """One engine's transfer ends; whole only when the trainer has sent in its epoch."""
        command, engine = self.transfers.pop(index)
        call = command.message
        assert isinstance(call, Receive)
        digest = self.sent.get((call.epoch, call.version))
        if whole and digest is not None:
            engine.arrive(digest)
        else:
            engine.break_transfer("connection closed by peer")
        self._run_engines()

    def deliver_answer(self, index: int = 0) -> None:
        event = self.answers.pop(index)
        if isinstance(event, events.CallAnswered | events.CallFailed):
            self.apply(event)

    def end_write(self, index: int = 0, *, stored: bool = True, known: bool = True) -> None:
        """A durable write ends: stored or not, and known to the writer or not."""
        write = self.writes.pop(index)
        if stored:
            self.store(write)
        event = events.RecordWritten(write.write) if stored and known else events.WriteFailed(write.write, "no answer")
        self.apply(event)

    def store(self, write: WriteRecord) -> None:
        assert write.record.version >= self.stored.version, "the stored version never falls"
        if isinstance(write, WriteCommit):
            self.published[write.record.version] = self.check_verified(write.record.version)
        self.stored = write.record

    def check_verified(self, version: int) -> str:
        """The digest that was sent; AssertionError unless every seat of the intended refit had received it."""
        intent, refit = self.stored.intent, self.committing
        assert intent is not None, "a commit follows an intent"
        assert (refit.epoch, refit.version) == (intent.epoch, version)
        sent = self.sent[intent.epoch, version]
        assert refit.sent is not None, "the trainer has said what it sent"
        assert set(refit.sent.digests.values()) == {sent}
        for seat in refit.seats:
            assert (seat.pod_uid, seat.instance, version, sent) in self.received, f"{seat.pod_name} lacks {version}"
        return sent

    def restart(self, engine: int, **fields: object) -> FakeEngine:
        """The engine's container starts anew, with the weights of its start."""
        fresh = self.workers[engine] = FakeEngine(self.workers[engine].member, instance=f"i{self.fresh()}", **fields)
        return fresh

    def step(self) -> bool:
        """Let the next thing that is under way happen; False when nothing is."""
        if self.reads:
            self.read_status()
        elif self.answers:
            self.deliver_answer()
        elif self.calls:
            self.deliver_call()
        elif self.writes:
            self.end_write()
        elif self.can_end_transfer():
            self.end_transfer()
        else:
            return False
        return True

    def settle(self, rounds: int = 400) -> None:
        """Deliver everything that is under way, in order, until nothing is."""
        for _ in range(rounds):
            if not self.step():
                return
        raise AssertionError("the protocol does not come to rest")

    def can_end_transfer(self) -> bool:
        """Whether the oldest transfer under way has all that it waits for."""
        if not self.transfers:
            return False
        call = self.transfers[0][0].message
        assert isinstance(call, Receive)
        engine = self.transfers[0][1]
        return (call.epoch, call.version) in self.sent or self.find(engine.member.pod_uid) is not engine

    # The trainer's words.

    def open_session(self, session: str = "s1", **fields: Any) -> None:
        values = {"trainer": f"trainer-{session}", "rendezvous": Rendezvous(host="10.1.1.1", port=29500)} | fields
        self.apply(events.SessionOpened(session, OpenSession(**values)))

    def request(
        self,
        version: int,
        refit: str = "r1",
        session: str = "s1",
        manifest: Manifest = MANIFEST,
        adapter: AdapterSpec | None = None,
        *,
        repair: bool = False,
    ) -> None:
        message = RequestRefit(version=version, manifest=manifest, adapter=adapter, repair=repair)
        self.apply(events.RefitRequested(refit, session, message, manifest_key(manifest.digest(), adapter)))

    def view(self, refit: str = "r1") -> RefitView:
        return view_refit(self.state, refit, self.now)

    def join(self, refit: str = "r1") -> None:
        self.apply(events.TrainerHasJoined(refit, TrainerJoined(epoch=self.view(refit).epoch)))

    def prepare(self, refit: str = "r1") -> None:
        view = self.view(refit)
        assert view.prepare is not None
        self.layouts = view.prepare.layouts
        self.apply(events.TrainerHasPrepared(refit, TrainerPrepared(epoch=view.epoch)))

    def send(self, refit: str = "r1", digest: str | None = None) -> None:
        """The trainer sends, and says so."""
        view = self.view(refit)
        self.sent.setdefault((view.epoch, view.version), digest_of(view.version, refit))
        self.tell_sent(refit, digest)

    def tell_sent(self, refit: str = "r1", digest: str | None = None) -> None:
        view = self.view(refit)
        epoch, version = view.epoch, view.version
        nbytes, tensors = MANIFEST.nbytes, len(MANIFEST.tensors)
        digests = dict.fromkeys(self.layouts or ("",), digest or self.sent[epoch, version])
        message = TrainerSent(epoch=epoch, tensors=tensors, nbytes=nbytes, digests=digests)
        self.apply(events.TrainerHasSent(refit, message))

    def fail(self, refit: str = "r1") -> None:
        self.apply(events.TrainerHasFailed(refit, TrainerFailed(epoch=self.view(refit).epoch, message="out of memory")))

    def run_refit(
        self,
        version: int,
        refit: str = "r1",
        session: str = "s1",
        adapter: AdapterSpec | None = None,
        manifest: Manifest = MANIFEST,
        *,
        repair: bool = False,
    ) -> RefitView:
        """A whole refit in which nothing goes wrong."""
        self.request(version, refit, session, manifest, adapter, repair=repair)
        return self.follow(refit)

    def begin(self, version: int = 1, refit: str = "r1") -> None:
        """A refit up to the transfer."""
        self.request(version, refit)
        self.settle()
        if self.view(refit).join is not None:
            self.join(refit)
        self.settle()
        assert self.view(refit).phase is Phase.TRANSFERRING

    def receive_all(self) -> None:
        """Every engine holds the version whole; the trainer has not said what it sent."""
        self.sent[self.view().epoch, self.view().version] = "bytes"
        while self.transfers or self.answers:
            self.end_transfer() if self.transfers else self.deliver_answer()

    def obey(self, refit: str = "r1") -> bool:
        """The trainer does what it is told to; False when nothing is waited for from it."""
        view = self.view(refit)
        if "trainer" not in view.waiting_for:
            return False
        if view.join is not None:
            self.join(refit)
        elif view.prepare is not None:
            self.prepare(refit)
        elif view.send is not None:
            self.send(refit)
        else:
            return False
        return True

    def follow(
        self, refit: str = "r1", *, until: Phase | None = None, rounds: int = 40, seconds: float = 1.0
    ) -> RefitView:
        """The trainer does what it is told to, in every attempt, until the refit ends or reaches a phase."""
        for _ in range(rounds):
            self.settle()
            view = self.view(refit)
            if view.phase in {Phase.COMPLETE, Phase.FAILED, until}:
                return view
            if not self.obey(refit):
                self.advance(seconds)
        raise AssertionError(f"refit {refit} did not end: {self.view(refit)}")

    def verbs(self) -> list[str]:
        """Every call so far that was not a report, in order."""
        return [c.verb.value for c in self.commands if isinstance(c, CallWorker) and c.verb is not Verb.REPORT]
