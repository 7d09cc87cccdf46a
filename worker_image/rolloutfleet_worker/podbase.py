"""What every verb of an engine pod stands on: one turn at a time, the fence, the door, orders to ranks, and the end of an epoch."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from rolloutfleet.contract.adapter import HeldAdapter
from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Call, Locality, SleepLevel, WakeTag, WorkerReport, WorkerState
from rolloutfleet_worker.fence import Door, Fence, Stale
from rolloutfleet_worker.ranks import ABORT_SECONDS, RankFailedError, Ranks, RankStuckError
from rolloutfleet_worker.wire import Frame

log = logging.getLogger(__name__)

ENGINE_CALL_SECONDS = 30.0
"""How long vLLM may take to resume, to reset its cache, to move its door or to swap weights."""
RESCUE_RETRY_SECONDS = 5.0
GIVEN_UP_WHEN_LEAVING = ("join", "prepare", "receive", "borrow")
"""Orders that may take long, and that others wait for."""
PAUSE_GRACE_SECONDS = 1.0
"""How much later than vLLM's own deadline a pause is ended that did not come about, so that vLLM's reason is the one that is told."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What vLLM says of a swap."""

    cache_reset: bool | None
    """None when no reset was asked for."""
    pause_seconds: float
    """How long no step of the model could run."""


class Engine(Protocol):
    """What the pod needs of vLLM."""

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> None: ...
    async def resume(self, deadline_seconds: float) -> None: ...
    async def reset_cache(self, deadline_seconds: float) -> bool: ...
    async def set_door(self, door: Door, *, version: int, reason: str, deadline_seconds: float) -> None: ...
    async def swap(self, version: int, *, reset_cache: bool, pause: bool, deadline_seconds: float) -> Swapped: ...
    async def serve_adapter(self, name: str, version: int, deadline_seconds: float) -> float: ...
    async def withdraw_adapters(self, names: Sequence[str], deadline_seconds: float) -> None: ...
    async def refuses_sleep(self, deadline_seconds: float) -> str: ...
    async def sleep(self, level: SleepLevel, deadline_seconds: float) -> None: ...
    async def wake(self, tags: Sequence[WakeTag], deadline_seconds: float) -> None: ...


class PodBase:
    """Fence, turn, ranks and engine of one pod, and what it says of itself."""

    def __init__(
        self,
        fence: Fence,
        engine_index: int,
        ranks: Ranks,
        rank_count: int,
        engine: Engine,
        kill: Callable[[], None],
        environment: Mapping[str, str],
        locality: Locality | None = None,
    ) -> None:
        self.fence = fence
        self._ranks = ranks
        self._rank_count = rank_count
        self._engine = engine
        self._kill = kill
        self._engine_index = engine_index
        self._environment = dict(environment)
        self.locality = locality or Locality()
        """What holds for every pod of the engine."""
        self._cache_reset_for = 0
        self._adapters: dict[str, HeldAdapter] = {}
        self._turn = asyncio.Lock()
        self._pausing: asyncio.Task[None] | None = None
        self._ending: str | None = None
        """Why whatever has the turn, or waits for it, is being ended."""
        self._endings = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._hold_end: asyncio.TimerHandle | None = None
        self._rescue: asyncio.Task[None] | None = None
        self._door_turn = asyncio.Lock()
        """Keeps two publications of the door from overtaking each other."""
        self._stale_end: asyncio.TimerHandle | None = None
        self._clock: Callable[[], float] = lambda: 0.0
        """That of the loop in which the end was set."""
        self._closing: asyncio.Task[None] | None = None
        self._ordered: Counter[str] = Counter()
        """What the ranks are at, by the order's name."""

    def report(self) -> WorkerReport:
        fence = self.fence
        up = self._ranks.complete.is_set()
        return WorkerReport(
            fleet_uid=fence.identity.fleet_uid,
            pod_name=fence.identity.pod_name,
            pod_uid=fence.identity.pod_uid,
            instance=fence.identity.instance,
            engine=self._engine_index,
            ranks=self._rank_count,
            state=fence.state,
            epoch=fence.epoch,
            version=fence.version,
            version_in_flight=fence.version_in_flight,
            admitted=fence.admitted,
            staged=fence.staged,
            held=bool(fence.held),
            lending=fence.lending,
            leaving=bool(fence.leaving),
            stale_seconds=self._stale_seconds(),
            vllm_version=self._ranks.described("vllm_version")[0] if up else "",
            nccl_version=self._ranks.described("nccl_version")[0] if up else "",
            devices=self._ranks.described("device") if up else (),
            locality=self.locality,
            sleep_level=fence.sleep_level,
            asleep=tuple(sorted(fence.asleep)),
            environment=self._environment,
            adapters={name: held.version for name, held in sorted(self._adapters.items())},
            message=fence.message or fence.unready_reason(),
        )

    @asynccontextmanager
    async def _act(self, call: Call) -> AsyncIterator[None]:
        """A turn for the call, which is accepted then; an abort that came before it is over by that time."""
        self.fence.accept(call)
        await self._settled.wait()
        async with self._turn:
            self.fence = self.fence.accept(call)
            self._require_engine()
            yield

    def _require_engine(self) -> None:
        if self.fence.state in {WorkerState.STARTING, WorkerState.FAILED}:
            raise self._problem(ProblemCode.WRONG_STATE, f"this worker is {self.fence.state}: {self.fence.message}")

    async def _order(self, op: str, orders: dict[int, Frame], deadline_seconds: float) -> dict[int, Frame]:
        """Answers by rank.

        Raises:
            RankFailedError: names every rank that failed and why.
            ProblemError: DeadlineExceeded; a rank did not even obey an abort, so that the engine had to be killed.
        """
        self._ordered[op] += 1
        try:
            return await self._ranks.order_all(op, orders, deadline_seconds)
        except RankStuckError as stuck:
            self._kill()
            raise self._problem(ProblemCode.DEADLINE_EXCEEDED, f"{stuck}; the engine is killed and restarts") from stuck
        finally:
            self._ordered[op] -= 1

    async def leave(self, reason: str) -> None:
        """Be Ready no more, and end a transfer under way, so that the others go on without this engine at once.

        A version that is here whole is kept until it is committed or given up, and requests in flight are served.
        """
        self.fence = self.fence.leaves(reason)
        if any(self._ordered[op] for op in GIVEN_UP_WHEN_LEAVING):
            await self._end_epoch(reason)

    @property
    def owes_an_end(self) -> bool:
        """Whether a version is here that is neither committed nor given up, so that requests may stand still for it."""
        return (
            self.fence.state in {WorkerState.PAUSED, WorkerState.RECEIVING, WorkerState.RECEIVED} or self.fence.staged
        )

    async def _end_epoch(self, reason: str) -> None:
        """Leave the group, then settle: the door follows the fence, and a whole worker generates."""
        self._settled.clear()
        self._endings += 1
        try:
            await self._take_turn_now(reason)
            try:
                self.fence = self.fence.aborted(reason)
                await self._publish_door(self.fence)
                if self.fence.whole:
                    await self._resume()
            finally:
                self._turn.release()
        finally:
            self._endings -= 1
            if not self._endings:
                self._settled.set()

    async def _take_turn_now(self, reason: str) -> None:
        """End whatever has the turn, or waits for it to pause, and take it."""
        self._ending = reason
        try:
            if self._pausing is not None:
                self._pausing.cancel()
            await self._ranks.abort_all()
            async with asyncio.timeout(ABORT_SECONDS):
                await self._turn.acquire()
        except (RankStuckError, TimeoutError) as error:
            self._kill()
            raise self._problem(
                ProblemCode.DEADLINE_EXCEEDED, f"this worker could not be unblocked; the engine is killed: {error}"
            ) from error
        finally:
            self._ending = None

    async def _pause_engine(self, mode: PauseMode, deadline_seconds: float) -> None:
        """Returns when no step of the model runs any more; an abort ends the wait for that, and resumes the engine.

        Raises:
            ProblemError: vLLM did not pause in time, or an abort came.
        """
        if self._ending is None:
            pausing = self._pausing = asyncio.create_task(self._engine.pause(mode, deadline_seconds), name="pausing")
            try:
                await asyncio.wait({pausing})
            finally:
                self._pausing = None
                pausing.cancel()
            if not pausing.cancelled():
                return pausing.result()
        raise self._problem(ProblemCode.TRANSFER_FAILED, f"the pause was ended by an abort: {self._ending}")

    async def _resume(self) -> None:
        await self._engine.resume(ENGINE_CALL_SECONDS)
        self.fence = self.fence.resumed()
        self._release_hold()

    async def _publish_door(self, fence: Fence) -> None:
        async with self._door_turn:
            await self._engine.set_door(
                fence.door, version=fence.version, reason=fence.unready_reason(), deadline_seconds=ENGINE_CALL_SECONDS
            )

    def _admit(self, version: int, stale_seconds: float | None) -> None:
        """What may be served for a while only is fenced by then, whoever lives; an end that was told before is never put off."""
        told, self._stale_end = self._stale_end, None
        if told is not None:
            told.cancel()
        if stale_seconds is None:
            self.fence = self.fence.admit(version)
            return
        was = self.fence.stale
        self.fence = self.fence.admit_stale(version)
        if self.fence.stale is Stale.ALLOWED:
            loop = asyncio.get_running_loop()
            self._clock = loop.time
            until = loop.time() + stale_seconds
            if told is not None and was is Stale.ALLOWED:
                until = min(until, told.when())
            self._stale_end = loop.call_at(until, self._staleness_over)

    def _staleness_over(self) -> None:
        before = self.fence
        self.fence = before.stale_ends()
        if self.fence is not before:
            log.warning("version %d may not be served any longer: %s", self.fence.version, self.fence.unready_reason())
            self._closing = asyncio.create_task(self._close_stale(), name="stale")

    async def _close_stale(self) -> None:
        """Needs no turn: whoever has it publishes the fence as it is from now on."""
        try:
            await self._publish_door(self.fence)
        except ProblemError:
            log.exception(
                "the door could not be closed for a version that is too old; the engine is killed and restarts"
            )
            self._kill()

    def _stale_seconds(self) -> float | None:
        if self.fence.stale is Stale.ALLOWED and self._stale_end is not None:
            return max(self._stale_end.when() - self._clock(), 0.0)
        return 0.0 if self.fence.stale is Stale.OVER else None

    def _hold(self, seconds: float) -> None:
        """A sync job that vanished must not leave an engine paused, or a version staged, for ever: after this long that ends by itself."""
        self._release_hold()
        self._hold_end = asyncio.get_running_loop().call_later(seconds, self._forgotten, seconds)

    def _release_hold(self) -> None:
        if self._hold_end is not None:
            self._hold_end.cancel()
            self._hold_end = None

    def _forgotten(self, seconds: float) -> None:
        self._rescue = asyncio.create_task(self._end_forgotten(seconds), name="forgotten-by-the-sync-job")

    async def _end_forgotten(self, seconds: float) -> None:
        reason = (
            f"the sync job of fleet {self.fence.identity.fleet} let the pause or the staged version of epoch {self.fence.epoch} pass "
            f"its {seconds:g} s, so the worker left the group; see whether the sync job was killed, hangs or was cut off, then refit again"
        )
        log.error("%s", reason)
        self.fence = self.fence.gives_up(reason)
        try:
            await self._end_epoch(reason)
        except ProblemError:
            log.exception("the epoch could not be ended, trying again in %g s", RESCUE_RETRY_SECONDS)
            self._hold(RESCUE_RETRY_SECONDS)

    def _code_of(self, failure: RankFailedError, otherwise: ProblemCode) -> ProblemCode:
        """How a failure of the ranks is told: one that is this engine's own leaving is nobody else's fault."""
        if self.fence.leaving:
            return ProblemCode.MEMBER_ABSENT
        return ProblemCode.PEER_LOST if failure.cut_off else otherwise

    def _problem(self, code: ProblemCode, message: str) -> ProblemError:
        return ProblemError(code, message, member=self.fence.identity.pod_name)
