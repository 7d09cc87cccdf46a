"""What a rank other than 0 does in a refit: whatever rank 0 says, until rank 0 says how it ended."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.trainer import FleetView, RefitResult, TrainerJoin
from rolloutfleet.delivery import Cargo
from rolloutfleet.errors import TeamLost
from rolloutfleet.exiting import start_thread
from rolloutfleet.rank import Order, TrainerRank
from rolloutfleet.session import place_of
from rolloutfleet.sources import source_of
from rolloutfleet.sources.source import WeightSource
from rolloutfleet.team.links import Follower
from rolloutfleet.team.messages import (
    Begin,
    Connected,
    Do,
    Done,
    Ended,
    Failure,
    Here,
    Loaded,
    Message,
    Ready,
    Stop,
    describe,
    revive,
)

logger = logging.getLogger("rolloutfleet")

VERDICT_SECONDS: Final = 15.0
"""How long after its own deadline a rank still waits for rank 0's word, which names the cause."""

_STOP_SECONDS: Final = 5.0

OpenSeat = Callable[[Begin, int | None], TrainerRank]
"""Takes the session and the GPU on which the tensors lie."""


class FollowingTrainer:
    """One such rank, for as long as its team lasts."""

    def __init__(self, follower: Follower, open_seat: OpenSeat) -> None:
        self.rank = follower.rank
        self._follower = follower
        self._open_seat = open_seat
        self._round = 0
        self._known: Manifest | None = None
        self._given: str | None = None
        self._seated: TrainerRank | None = None

    def await_fleet(self, timeout: float) -> FleetView:
        """The fleet as rank 0 found it; raises what another rank raised."""
        self._follower.tell(Here())
        answer = self._hear(time.monotonic() + timeout + VERDICT_SECONDS)
        if isinstance(answer, Failure):
            raise revive(answer)
        if not isinstance(answer, Connected):
            raise TeamLost(f"trainer rank 0 sent {answer.kind} where it should say what the fleet is")
        return answer.view

    def decline(self, problem: Exception, timeout: float) -> None:
        """Tells rank 0 why this rank cannot connect, and returns when rank 0 has given up too."""
        self._follower.tell(describe(problem, 0))
        self._hear(time.monotonic() + timeout + VERDICT_SECONDS)

    def refit(
        self,
        tensors: Any,
        version: int,
        timeout: float,
        progress: object = None,
        adapter: AdapterSpec | None = None,
        *,
        repair: bool = False,
    ) -> RefitResult:
        """The result, once rank 0 has it; raises what rank 0 raises, or what this rank's own tensors do, and TeamLost without rank 0."""
        del progress, repair
        self._round += 1
        try:
            source = source_of(tensors, team=True)
            manifest = self._known = source.manifest(self._known)
            place = place_of(source.gpu(), source.shareable())
        except BaseException as error:
            self._give_up(error)
            raise
        digest = manifest.digest()
        ready = Ready(
            round=self._round,
            version=version,
            adapter=adapter,
            digest=digest,
            manifest=None if digest == self._given else manifest,
            device=place.device,
            locality=place.locality,
        )
        # Whether rank 0 takes it, only its Begin will say.
        self._given = None
        self._follower.tell(ready)
        return _Passage(self, source, manifest, digest, version, time.monotonic() + timeout + VERDICT_SECONDS).run()

    def _give_up(self, error: BaseException) -> None:
        """Tells rank 0 that this rank cannot go on, and waits for its word that the refit has ended."""
        self._follower.tell(describe(error, self._round))
        if isinstance(error, Exception):
            deadline = time.monotonic() + VERDICT_SECONDS
            while not isinstance(self.hear(deadline), Failure | Ended):
                pass

    def leave(self, reason: str) -> None:
        """Leaves the current group."""
        if self._seated is not None:
            self._seated.leave(reason)

    def close(self) -> None:
        """Leaves the group and the team."""
        self.leave("the fleet is closed")
        self._follower.close()

    def hear(self, deadline: float) -> Message:
        """Rank 0's next message of this refit."""
        while True:
            message = self._hear(deadline)
            if getattr(message, "round", self._round) == self._round:
                return message

    def taken(self, digest: str) -> None:
        """Notes that rank 0 has this rank's manifest, which need not be given again."""
        self._given = digest

    def tell(self, message: Message) -> None:
        """Sends to rank 0."""
        self._follower.tell(message)

    def sit(self, begin: Begin, gpu: int | None) -> TrainerRank:
        """This rank's seat in the session: the one it has, or a new one."""
        if self._seated is None or self._seated.seat.session != begin.session:
            self.leave("a new session begins")
            self._seated = self._open_seat(begin, gpu)
        return self._seated

    @property
    def round(self) -> int:
        """Number of the refit that this rank is in."""
        return self._round

    def _hear(self, deadline: float) -> Message:
        try:
            return self._follower.hear(deadline)
        except TeamLost:
            self.leave("trainer rank 0 is gone")
            raise


class _Passage:
    """One refit of such a rank."""

    def __init__(
        self,
        trainer: FollowingTrainer,
        source: WeightSource,
        manifest: Manifest,
        digest: str,
        version: int,
        deadline: float,
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._manifest = manifest
        self._digest = digest
        self._version = version
        self._deadline = deadline
        self._cancelled = threading.Event()
        self._work: threading.Thread | None = None
        self._cargo: Cargo | None = None
        self._seated: TrainerRank | None = None
        self._own_error: Exception | None = None

    def run(self) -> RefitResult:
        try:
            verdict = self._verdict()
        except BaseException as error:
            self._stop(f"{type(error).__name__}: {error}")
            if not isinstance(error, TeamLost):
                self._trainer.tell(describe(error, self._trainer.round))
            raise
        if isinstance(verdict, Failure):
            # Rank 0 has had this rank leave the group before, unless the group is still of use.
            raise revive(verdict) from self._own_error
        self._join_work()
        return verdict.result

    def _verdict(self) -> Ended | Failure:
        while True:
            message = self._trainer.hear(self._deadline)
            if isinstance(message, Ended | Failure):
                return message
            self._act(message)

    def _act(self, message: Message) -> None:
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Do) and self._seated is not None and self._cargo is not None:
            order, seated, cargo, cancelled = message.order, self._seated, self._cargo, self._cancelled
            if isinstance(order, TrainerJoin):
                self._own_error = None
            self._work = start_thread(
                "rolloutfleet-rank",
                lambda: self._perform(order, seated, cargo, cancelled),
                lambda: self._leave("the process ends"),
            )
        elif isinstance(message, Stop):
            self._stop(message.reason)
            self._cancelled = threading.Event()  # another attempt may follow

    def _begin(self, begin: Begin) -> None:
        self._trainer.taken(self._digest)
        manifest = begin.manifest or self._manifest
        cargo = Cargo(self._source, manifest, begin.digest, self._version)
        try:
            seated = self._trainer.sit(begin, self._source.gpu())
            moved = seated.load(cargo)
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 must hear of it, and decides
            self._fail(error)
            return
        self._cargo, self._seated = cargo, seated
        self._trainer.tell(Loaded(round=begin.round, moved=moved))

    def _perform(self, order: Order, seated: TrainerRank, cargo: Cargo, cancelled: threading.Event) -> None:
        try:
            seated.perform(order, cargo, cancelled)
            self._trainer.tell(Done(round=self._trainer.round, step=type(order).__name__, epoch=order.epoch))
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame; rank 0 decides what becomes of it
            if not cancelled.is_set():
                self._fail(error, order.epoch)

    def _fail(self, error: Exception, epoch: int = 0) -> None:
        self._own_error = error
        try:
            self._trainer.tell(describe(error, self._trainer.round, epoch))
        except TeamLost as lost:
            logger.warning("trainer rank 0 was not told of %s: %s", type(error).__name__, lost)

    def _stop(self, reason: str) -> None:
        self._leave(reason)
        self._join_work()

    def _leave(self, reason: str) -> None:
        self._cancelled.set()
        if self._seated is not None:
            self._seated.leave(reason)

    def _join_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.join(_STOP_SECONDS)
            if work.is_alive():
                logger.warning("%s did not end within %g s of being aborted", work.name, _STOP_SECONDS)
