"""What rank 0 does with the other ranks in a refit: musters them, has them do what it does, and learns of the first that fails."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.trainer import RefitResult
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet.errors import DeadlineExceeded, InvalidRequest, TeamLost
from rolloutfleet.rank import Order
from rolloutfleet.sources.merging import merge_manifests
from rolloutfleet.team.links import Leader
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

Answer = TypeVar("Answer", Here, Ready, Loaded)


class Crew:
    """The other ranks of a team; without a team, nobody, and every call returns at once.

    Calls raise what another rank raised, as far as it is of a kind that this process knows, with that rank named; TeamLost when a rank
    is gone; DeadlineExceeded naming the ranks that said nothing. A lost rank is not forgotten: every later call raises it again.
    """

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._round = 0
        self._lost: TeamLost | None = None
        self._manifests: dict[int, tuple[str, Manifest]] = {}
        """The last one that each other rank gave, behind its digest."""
        self._done: set[tuple[int, str, int]] = set()
        self._change = threading.Condition()
        self._failure: Exception | None = None
        self._epoch = 0
        """Of the order that was given last in this attempt."""

    @property
    def ranks(self) -> int:
        """Ranks of the team, this one included."""
        return self._leader.ranks

    @property
    def failure(self) -> Exception | None:
        """What the first rank that failed in this attempt has raised; :meth:`watch` has told of it."""
        return self._failure

    def agree(self, timeout: float) -> None:
        """Returns once every other rank has called ``connect`` and found its token."""
        for _ in self._answers(Here, time.monotonic() + timeout, "call connect()"):
            pass

    def muster(
        self, version: int, manifest: Manifest, digest: str, deadline: float, adapter: AdapterSpec | None = None
    ) -> tuple[Manifest, tuple[Ready, ...]]:
        """The team's manifest and what the other ranks said, once all have begun a refit to the same version.

        Call :meth:`open_round` before this rank looks at its own tensors. Raises InvalidRequest for ranks that want another version
        or adapter, or whose tensors are not known.
        """
        said = dict(self._answers(Ready, deadline, f"call refit(version={version})"))
        for rank, ready in said.items():
            if ready.manifest is not None:
                self._manifests[rank] = ready.digest, ready.manifest
        for rank, ready in said.items():
            if ready.version != version:
                raise InvalidRequest(
                    f"trainer rank {rank} refits to version {ready.version} and rank 0 to version {version}; all ranks give the same one"
                )
            if ready.adapter != adapter:
                raise InvalidRequest(
                    f"trainer rank {rank} refits {_weights(ready.adapter)} and rank 0 {_weights(adapter)}; all ranks give the same"
                )
        if all(ready.digest == digest for ready in said.values()):
            return manifest, tuple(said.values())
        others = [self._manifest_of(rank, ready.digest) for rank, ready in said.items()]
        return merge_manifests([manifest, *others]), tuple(said.values())

    def open_round(self) -> None:
        """Begins a refit: what ranks still say of the former one is dropped."""
        self._round += 1
        self.open_attempt()

    def open_attempt(self) -> None:
        """Begins an attempt of the refit, which has an epoch of its own: how ranks fared in the one before does not matter any more."""
        with self._change:
            self._done.clear()
            self._failure, self._epoch = self._lost, 0

    def begin(self, session: str, rendezvous: Rendezvous, manifest: Manifest, digest: str, deadline: float) -> bool:
        """Whether a rank holds other parts of this manifest than it told the session's workers before, once all have looked."""
        for rank in self._leader.others:
            own = self._manifests.get(rank, ("", None))[0]
            self._leader.tell(
                Begin(
                    round=self._round,
                    session=session,
                    rendezvous=rendezvous,
                    digest=digest,
                    manifest=None if own == digest else manifest,
                ),
                rank,
            )
        return any(loaded.moved for _, loaded in self._answers(Loaded, deadline, "look at its tensors"))

    def watch(self, on_failure: Callable[[Failure | TeamLost, str], None]) -> Callable[[], None]:
        """Notes what the ranks have done, and calls ``on_failure`` for the first one that fails in an attempt, with what it said and with a
        sentence that names it, until the result is called."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(on_failure, ended), name="rolloutfleet-crew", daemon=True)

        def end() -> None:
            ended.set()
            self._leader.inbox.put((0, Stop(round=self._round, reason="")))
            thread.join()

        if not self._leader.others:
            return ended.set
        thread.start()
        return end

    def order(self, order: Order) -> None:
        """Has every other rank do what this one is about to do."""
        with self._change:
            self._epoch = order.epoch
        self._leader.tell(Do(round=self._round, order=order))

    def await_done(self, order: Order, cancelled: threading.Event) -> None:
        """Returns once every other rank has done the order, within its deadline; while :meth:`watch` is on."""
        wanted = {(rank, type(order).__name__, order.epoch) for rank in self._leader.others}
        deadline = time.monotonic() + order.deadline_seconds
        with self._change:
            while not wanted <= self._done:
                if self._failure is not None:
                    raise self._failure
                if cancelled.is_set():
                    raise ConnectionAbortedError("the refit ended while other trainer ranks were at work")
                left = deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(str(rank) for rank, _, _ in sorted(wanted - self._done))
                    raise TimeoutError(
                        f"trainer rank {late} did not finish {type(order).__name__} within {order.deadline_seconds:g} s"
                    )
                self._change.wait(min(left, 0.2))

    def stop(self, reason: str) -> None:
        """Has every other rank leave the group."""
        self._leader.tell(Stop(round=self._round, reason=reason))

    def connected(self, message: Connected) -> None:
        """Tells every other rank what the fleet is."""
        self._leader.tell(message)

    def ended(self, result: RefitResult) -> None:
        """Tells every other rank how the refit ended."""
        self._leader.tell(Ended(round=self._round, result=result))

    def failed(self, error: BaseException) -> None:
        """Has every other rank raise what this one is about to raise."""
        self._leader.tell(describe(error, self._round))

    def close(self) -> None:
        """Ends the connections to the other ranks."""
        self._leader.close()

    def _manifest_of(self, rank: int, digest: str) -> Manifest:
        held, manifest = self._manifests.get(rank, ("", None))
        if manifest is None or held != digest:
            raise InvalidRequest(
                f"trainer rank {rank} speaks of tensors with digest {digest[:12]} that it has not described to rank 0; call refit() on "
                "all ranks again"
            )
        return manifest

    def _answers(self, kind: type[Answer], deadline: float, what: str) -> Iterator[tuple[int, Answer]]:
        """One message of this kind from every other rank, by rank."""
        found: dict[int, Answer] = {}
        while len(found) < len(self._leader.others):
            if self._lost is not None:
                raise self._lost
            try:
                rank, message = self._leader.inbox.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                late = ", ".join(str(rank) for rank in self._leader.others if rank not in found)
                raise DeadlineExceeded(f"trainer rank {late} did not {what} in time") from None
            failure = self._failure_of(rank, message)
            if failure is not None:
                raise failure
            if isinstance(message, kind) and getattr(message, "round", self._round) == self._round:
                found[rank] = message
        yield from sorted(found.items())

    def _failure_of(self, rank: int, message: Message | TeamLost) -> Exception | None:
        if isinstance(message, TeamLost):
            self._lost = self._lost or message
            return message
        if isinstance(message, Failure) and message.round == self._round:
            return revive(message, f"trainer rank {rank}")
        return None

    def _watch(self, on_failure: Callable[[Failure | TeamLost, str], None], ended: threading.Event) -> None:
        while not ended.is_set():
            rank, message = self._leader.inbox.get()
            failure = self._failure_of(rank, message)
            with self._change:
                if isinstance(message, Failure) and message.epoch not in {0, self._epoch}:
                    continue  # of an attempt that is over
                if isinstance(message, Done) and message.round == self._round:
                    self._done.add((rank, message.step, message.epoch))
                first = failure is not None and self._failure is None
                self._failure = self._failure or failure
                self._change.notify_all()
            if first and not ended.is_set() and isinstance(message, Failure | TeamLost):
                on_failure(message, f"{type(failure).__name__}: {failure}")


def _weights(adapter: AdapterSpec | None) -> str:
    return "all weights" if adapter is None else f"adapter {adapter.model_dump_json(by_alias=True)}"
