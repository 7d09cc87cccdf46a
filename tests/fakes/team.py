"""A trainer of several ranks as threads: real connections between them, and small stand-ins for fleet, tensors and transport."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rolloutfleet.channel import Target
from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.trainer import (
    FleetView,
    Phase,
    RefitResult,
    RefitView,
    SessionView,
    TrainerJoin,
    TrainerPrepare,
    TrainerSend,
)
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet.delivery import Cargo, Seat, Sent
from rolloutfleet.errors import InvalidRequest
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings, Piece
from rolloutfleet.leading import LeadingTrainer
from rolloutfleet.rank import TrainerRank
from rolloutfleet.session import RankPlace, Session, TrainerIdentity
from rolloutfleet.team.crew import Crew
from rolloutfleet.team.following import FollowingTrainer
from rolloutfleet.team.forming import Meeting, gather_followers, join_leader
from rolloutfleet.team.links import Follower
from rolloutfleet.team.messages import Begin

SECRET = "s3cret"
RENDEZVOUS = Rendezvous(host="127.0.0.1", port=29500)
FLEET = FleetView(
    fleet="quickstart",
    namespace="default",
    fleet_uid="uid",
    model="tiny",
    phase=Phase.PENDING,
    epoch=0,
    version=0,
    transport=Transport.LAYOUT,
    engines=1,
    members=(),
    endpoints=(),
)


class FakeSource:
    """Tensors of one element, of which the rank holds all that it names, or none."""

    def __init__(self, *names: str, held: bool = True, broken: Exception | None = None, gpu: int | None = None) -> None:
        self._names = names
        self._gpu = gpu
        self._held = held
        self._broken = broken
        self.bound: Manifest | None = None

    def manifest(self, known: Manifest | None = None) -> Manifest:
        if self._broken is not None:
            raise self._broken
        return Manifest(tensors=tuple(TensorSpec(name=name, dtype="int8", shape=(1,)) for name in self._names))

    def bind(self, manifest: Manifest) -> None:
        self.bound = manifest

    def gpu(self) -> int | None:
        return self._gpu

    def shareable(self) -> bool:
        return True

    def addresses(self) -> tuple[Any, ...]:
        return self._names, self._held

    def holdings(self, rank: int, ranks: int) -> Holdings:
        assert self.bound is not None
        pieces = [
            Piece(index, Block.contiguous(0, 1))
            for index, spec in enumerate(self.bound.tensors)
            if self._held and spec.name in self._names
        ]
        return Holdings(rank, tuple(pieces))

    def spans(self, source: int, block: Block) -> None: ...

    def read(self, source: int, block: Block, dtype: Any = None, device: Any = None) -> None: ...

    def whole(self) -> Any: ...


class FakeDelivery:
    """Notes what its rank does, and does what the test says instead of sending."""

    def __init__(self, team: "ThreadTeam", rank: int) -> None:
        self._team = team
        self._rank = rank
        self.ended = threading.Event()

    def aim(self, cargo: Cargo) -> None: ...

    def prepare(self, order: TrainerPrepare, cargo: Cargo, cancelled: threading.Event) -> None:
        self._team.note(self._rank, "prepare", cargo)

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        self._team.note(self._rank, "send", cargo)
        self._team.on_send.get(self._rank, lambda _: None)(self)
        return Sent(1, 1, {"layout": "digest"} if self._rank == 0 else {})

    def block(self) -> None:
        """Waits as a transport does whose peer is gone, until the group is left."""
        assert self.ended.wait(20)
        raise ConnectionAbortedError("the group has ended")

    def end(self, reason: str) -> None:
        self._team.note(self._rank, "leave", None)
        self.ended.set()


class ScriptedFleet:
    """A sync job that joins, prepares and sends once told that the trainer has done the step before."""

    def __init__(self) -> None:
        self.target = Target(url="http://127.0.0.1:1", fleet="quickstart", namespace="default")
        self.told: list[str] = []
        self.requests: list[Any] = []
        self.refuse: Problem | None = None
        self.seconds = 30.0
        self._view: RefitView | None = None
        self._change = threading.Condition()
        self._epoch = 0
        self._joined = False

    def get(self, path: str, answer: type, *, query: dict[str, str] | None = None, held: float = 0.0) -> Any:
        if path == "fleet":
            return FLEET
        assert query is not None
        with self._change:
            self._change.wait_for(lambda: self._view.sequence > int(query["after"]), float(query["wait"]))
            return self._view

    def post(self, path: str, body: Any, answer: type, *, held: float = 0.0) -> Any:
        if self.refuse is not None:
            raise InvalidRequest("(StaleVersion): no", problem=self.refuse)
        self.requests.append(body)
        if not self._joined:
            self._epoch += 1
        orders = {"send": self._send()} if self._joined else {"join": self._join()}
        self._view = RefitView(
            refit="r", version=body.version, epoch=self._epoch, phase=Phase.FORMING, sequence=1, **orders
        )
        return self._view

    def tell(self, path: str, body: Any) -> None:
        step = path.rpartition("/")[2]
        self.told.append(f"failed: {body.message}" if step == "failed" else step)
        if step == "joined":
            self._joined = True
            prepare = TrainerPrepare(epoch=self._epoch, layouts=("layout",), deadline_seconds=self.seconds)
            self._show(phase=Phase.PREPARING, prepare=prepare)
        elif step == "prepared":
            self._show(phase=Phase.TRANSFERRING, send=self._send())
        elif step == "sent":
            self._show(phase=Phase.COMPLETE, result=self._result())
        else:
            self._joined = False
            problem = Problem(
                code=ProblemCode.TRANSFER_FAILED, message=body.message, phase="Transferring", member="trainer"
            )
            self._show(phase=Phase.FAILED, problem=problem)

    def delete(self, path: str) -> None:
        self._joined = False

    def _join(self) -> TrainerJoin:
        return TrainerJoin(
            epoch=self._epoch,
            transport=Transport.LAYOUT,
            wire=Wire.GLOO,
            trainer_ranks=3,
            world_size=4,
            deadline_seconds=self.seconds,
        )

    def _send(self) -> TrainerSend:
        return TrainerSend(epoch=self._epoch, deadline_seconds=self.seconds)

    def _result(self) -> RefitResult:
        return RefitResult(
            version=self._view.version,
            epoch=self._epoch,
            members=("pod",),
            tensors=1,
            nbytes=1,
            digest="",
            live_digest="",
            seconds={},
            pause_seconds=0.0,
            gigabytes_per_second=0.0,
        )

    def _show(self, **fields: Any) -> None:
        with self._change:
            cleared = {"join": None, "prepare": None, "send": None}
            self._view = self._view.model_copy(update={**cleared, **fields, "sequence": self._view.sequence + 1})
            self._change.notify_all()


class ThreadTeam:
    """Three ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet = ScriptedFleet()
        self.steps: list[tuple[int, str]] = []
        self.cargoes: list[Cargo] = []
        self.places: list[RankPlace] = []
        self.sessions = 0
        self.gpus: list[int | None] = []
        """On which rank 0's tensors lay, by session."""
        self.published: list[Holdings] = []
        self.on_send: dict[int, Callable[[FakeDelivery], None]] = {}
        self._guard = threading.Lock()
        monkeypatch.setattr("rolloutfleet.rank.join_epoch", self._join_epoch)
        monkeypatch.setattr("rolloutfleet.leading.open_session", self._open_session)
        monkeypatch.setattr(TrainerRank, "_publish", lambda rank, cargo, holdings: self.published.append(holdings))
        leader, self.ends = connected_ends(3)
        identity = TrainerIdentity(environment={})
        self.leading = LeadingTrainer(self.fleet, identity, Crew(leader))
        self.following = [FollowingTrainer(end, self._seat_of(end)) for end in self.ends]
        self._threads = ThreadPoolExecutor(max_workers=3)

    def note(self, rank: int, step: str, cargo: Cargo | None) -> None:
        with self._guard:
            self.steps.append((rank, step))
            if cargo is not None:
                self.cargoes.append(cargo)

    def start(
        self, rank: int, source: Any, version: int = 1, timeout: float = 20.0, adapter: AdapterSpec | None = None
    ) -> Future:
        """One rank's refit, in a thread of its own."""
        trainer = (self.leading, *self.following)[rank]
        return self._threads.submit(trainer.refit, source, version, timeout, None, adapter)

    def refit(self, *sources: Any, version: int = 1, timeout: float = 20.0) -> list[RefitResult | BaseException]:
        """What ``refit`` returns or raises on every rank."""
        sources = sources or tuple(FakeSource("a") for _ in range(3))
        calls = [self.start(rank, source, version, timeout) for rank, source in enumerate(sources)]
        return [call.exception(30) or call.result() for call in calls]

    def close(self) -> None:
        self.leading.close()
        for trainer in self.following:
            trainer.close()
        self._threads.shutdown()

    def _join_epoch(self, order: TrainerJoin, seat: Seat, cancelled: threading.Event) -> FakeDelivery:
        self.note(seat.rank, "join", None)
        return FakeDelivery(self, seat.rank)

    def _open_session(
        self, channel: Any, fleet: FleetView, identity: Any, gpu: int | None, shareable: bool, others: list[RankPlace]
    ) -> Session:
        self.sessions += 1
        self.gpus.append(gpu)
        self.places = others
        seat = Seat(store=None, session=f"s{self.sessions}", rank=0, ranks=3, gpu=None)
        view = SessionView(session=seat.session, lease_seconds=600, fleet=fleet)
        return Session(channel, TrainerRank(seat), RENDEZVOUS, view)

    def _seat_of(self, end: Follower) -> Callable[[Begin, int | None], TrainerRank]:
        return lambda begin, gpu: TrainerRank(
            Seat(store=None, session=begin.session, rank=end.rank, ranks=end.ranks, gpu=gpu)
        )


def connected_ends(ranks: int) -> tuple[Any, list[Follower]]:
    """The ends of a team, rank 0's first."""
    deadline = time.monotonic() + 20
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        meeting = Meeting(hosts=("127.0.0.1",), port=listening.getsockname()[1], secret=SECRET)
        joins = [threads.submit(join_leader, meeting, rank, deadline) for rank in range(1, ranks)]
        leader = gather_followers(listening, SECRET, ranks, deadline)
        return leader, [join.result() for join in joins]
