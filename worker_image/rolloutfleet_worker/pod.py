"""One engine pod: carries out the control calls that its fence accepts, on vLLM and on its ranks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from rolloutfleet.contract.policy import CachePolicy, PauseMode, Transport
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import (
    Abort,
    Admit,
    CacheReport,
    Call,
    Check,
    CheckReport,
    Commit,
    CommitReport,
    Join,
    JoinReport,
    Pause,
    Receive,
    ReceiveReport,
    ResetCache,
    Resume,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_worker.fence import Door, Fence
from rolloutfleet_worker.ranks import ABORT_SECONDS, RankFailedError, Ranks, RankStuckError
from rolloutfleet_worker.reports import merge_checks, merge_receives
from rolloutfleet_worker.wire import Frame

log = logging.getLogger(__name__)

ENGINE_CALL_SECONDS = 30.0
"""How long vLLM may take to resume, to reset its cache or to move its door."""
RESCUE_RETRY_SECONDS = 5.0


class Engine(Protocol):
    """What the pod needs of vLLM."""

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> None: ...
    async def resume(self, deadline_seconds: float) -> None: ...
    async def reset_cache(self, deadline_seconds: float) -> bool: ...
    async def set_door(self, door: Door, *, version: int, reason: str, deadline_seconds: float) -> None: ...


class EnginePod:
    """The control surface's verbs. One that changes anything runs at a time; an abort interrupts a join or a transfer first."""

    def __init__(
        self,
        fence: Fence,
        engine_index: int,
        ranks: Ranks,
        rank_count: int,
        engine: Engine,
        kill: Callable[[], None],
        environment: Mapping[str, str],
    ) -> None:
        self.fence = fence
        self._engine_index = engine_index
        self._ranks = ranks
        self._rank_count = rank_count
        self._engine = engine
        self._kill = kill
        self._environment = dict(environment)
        self._turn = asyncio.Lock()
        self._transport = Transport.GLOO
        self._cache_reset_for = 0
        self._pause_end: asyncio.TimerHandle | None = None
        self._rescue: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """vLLM is up: from now on calls are answered."""
        async with self._turn:
            await self._publish_door(self.fence.started())
            self.fence = self.fence.started()

    def failed(self, message: str) -> None:
        self.fence = self.fence.failed(message)

    async def reconcile_pause(self, *, paused: bool) -> None:
        """Let an engine generate again that vLLM says is paused although nobody here has paused it."""
        if paused and self.fence.state is WorkerState.SERVING and not self._turn.locked():
            log.warning("vLLM is paused outside a refit; it is resumed")
            async with self._turn:
                if self.fence.state is WorkerState.SERVING:
                    await self._engine.resume(ENGINE_CALL_SECONDS)

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
            vllm_version=self._ranks.described("vllm_version")[0] if up else "",
            nccl_version=self._ranks.described("nccl_version")[0] if up else "",
            devices=self._ranks.described("device") if up else (),
            environment=self._environment,
            message=fence.message or fence.unready_reason(),
        )

    async def admit(self, call: Admit) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.admit(call.version)
            await self._publish_door(self.fence)
        return self.report()

    async def check(self, call: Check) -> CheckReport:
        """Runs beside generation and beside other calls; the weights are not touched."""
        self.fence = self.fence.accept(call)
        self._require_engine()
        orders = self._ranks.every_rank({"manifest": call.manifest.model_dump(mode="json")})
        try:
            answers = await self._order("check", orders, call.deadline_seconds)
        except RankFailedError as failure:
            raise self._problem(ProblemCode.ENGINE_FAILED, f"the manifest could not be checked: {failure}") from failure
        return merge_checks(call.manifest, list(answers.values()))

    async def join(self, call: Join) -> JoinReport:
        async with self._act(call):
            self.fence = self.fence.join_begins()
            self._transport = call.transport
            orders: dict[int, Frame] = {
                local: {
                    "epoch": call.epoch,
                    "transport": call.transport,
                    "rendezvous": call.rendezvous.model_dump(mode="json"),
                    "rank_offset": call.rank_offset,
                    "rank": call.rank_offset + local,
                    "world_size": call.world_size,
                    "timeout_seconds": call.deadline_seconds,
                }
                for local in range(self._rank_count)
            }
            try:
                answers = await self._order("join", orders, call.deadline_seconds)
            except RankFailedError as failure:
                raise self._problem(ProblemCode.MEMBER_ABSENT, str(failure)) from failure
            self.fence = self.fence.join_done()
        return JoinReport(ranks=tuple(answers[local]["rank"] for local in range(self._rank_count)))

    async def pause(self, call: Pause) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.pause_begins()
            # vLLM stops scheduling at once, long before a pause that waits for requests is answered.
            self._hold_pause(call.deadline_seconds)
            await self._engine.pause(call.mode, call.deadline_seconds)
            self.fence = self.fence.paused()
        return self.report()

    async def receive(self, call: Receive) -> ReceiveReport:
        async with self._act(call):
            was = self.fence
            self.fence = was.receive_begins(call.version)
            self._hold_pause(call.deadline_seconds + call.hold_seconds)
            body = {
                "manifest": call.manifest.model_dump(mode="json"),
                "transport": self._transport,
                "timeout_seconds": call.deadline_seconds,
            }
            try:
                await self._publish_door(self.fence)
                answers = await self._order("receive", self._ranks.every_rank(body), call.deadline_seconds)
            except RankFailedError as failure:
                await self._transfer_failed(was, touched=failure.touched, message=str(failure))
                raise self._problem(ProblemCode.TRANSFER_FAILED, str(failure)) from failure
            except ProblemError as problem:
                await self._transfer_failed(was, touched=True, message=str(problem))
                raise
            self.fence = self.fence.receive_done()
        return merge_receives(call.version, [answers[rank] for rank in sorted(answers)])

    async def commit(self, call: Commit) -> CommitReport:
        """The cache goes before the version is called whole: whatever fails in between leaves the worker fenced."""
        async with self._act(call):
            self.fence = self.fence.commit_begins(call.version)
            reset = None if call.cache is CachePolicy.KEEP else await self._reset_cache_for(call.version)
            if reset is not False:
                self.fence = self.fence.committed(call.version)
            await self._publish_door(self.fence)
        return CommitReport(version=call.version, cache_reset=reset)

    async def resume(self, call: Resume) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.resume_begins()
            await self._resume()
        return self.report()

    async def abort(self, call: Abort) -> WorkerReport:
        """Unblocks a join or transfer under way first, then waits for it to have ended; a whole worker generates afterwards."""
        self.fence = self.fence.accept(call)
        await self._end_epoch(call.reason)
        return self.report()

    async def reset_cache(self, call: ResetCache) -> CacheReport:
        async with self._act(call):
            return CacheReport(cache_reset=await self._engine.reset_cache(ENGINE_CALL_SECONDS))

    @asynccontextmanager
    async def _act(self, call: Call) -> AsyncIterator[None]:
        self.fence.accept(call)
        async with self._turn:
            self.fence = self.fence.accept(call)
            self._require_engine()
            yield

    def _require_engine(self) -> None:
        if self.fence.state in {WorkerState.STARTING, WorkerState.FAILED}:
            raise self._problem(ProblemCode.WRONG_STATE, f"this worker is {self.fence.state}: {self.fence.message}")

    async def _order(self, op: str, orders: dict[int, Frame], deadline_seconds: float) -> dict[int, Frame]:
        try:
            return await self._ranks.order_all(op, orders, deadline_seconds)
        except RankStuckError as stuck:
            self._kill()
            raise self._problem(ProblemCode.DEADLINE_EXCEEDED, f"{stuck}; the engine is killed and restarts") from stuck

    async def _transfer_failed(self, was: Fence, *, touched: bool, message: str) -> None:
        self.fence = self.fence.receive_failed(touched=touched, was=was, message=message)
        await self._publish_door(self.fence)

    async def _reset_cache_for(self, version: int) -> bool:
        """Whether the cache holds nothing older than the version; if not, the worker is fenced and says why."""
        if self._cache_reset_for == version and self.fence.holds(version):
            return True
        try:
            reset, why = await self._engine.reset_cache(ENGINE_CALL_SECONDS), "vLLM answered no"
        except ProblemError as problem:
            reset, why = False, str(problem)
        if reset:
            self._cache_reset_for = version
        else:
            self.fence = self.fence.cache_not_reset(version, why)
        return reset

    async def _end_epoch(self, reason: str) -> None:
        """Leave the group, then settle: the door follows the fence, and a whole worker generates."""
        try:
            await self._ranks.abort_all()
            async with asyncio.timeout(ABORT_SECONDS):
                await self._turn.acquire()
        except (RankStuckError, TimeoutError) as error:
            self._kill()
            raise self._problem(
                ProblemCode.DEADLINE_EXCEEDED, f"this worker could not be unblocked; the engine is killed: {error}"
            ) from error
        try:
            self.fence = self.fence.aborted(reason)
            await self._publish_door(self.fence)
            if self.fence.whole:
                await self._resume()
        finally:
            self._turn.release()

    async def _resume(self) -> None:
        await self._engine.resume(ENGINE_CALL_SECONDS)
        self.fence = self.fence.resumed()
        if self._pause_end is not None:
            self._pause_end.cancel()
            self._pause_end = None

    async def _publish_door(self, fence: Fence) -> None:
        await self._engine.set_door(
            fence.door, version=fence.version, reason=fence.unready_reason(), deadline_seconds=ENGINE_CALL_SECONDS
        )

    def _hold_pause(self, seconds: float) -> None:
        """A sync job that vanished must not leave an engine paused for ever: after this long the pause ends by itself."""
        if self._pause_end is not None:
            self._pause_end.cancel()
        self._pause_end = asyncio.get_running_loop().call_later(seconds, self._pause_forgotten)

    def _pause_forgotten(self) -> None:
        self._rescue = asyncio.create_task(self._end_forgotten_pause(), name="forgotten-pause")

    async def _end_forgotten_pause(self) -> None:
        log.error("the sync job has let a pause pass its deadline; this worker leaves the group")
        try:
            await self._end_epoch("the sync job let the pause pass its deadline")
        except ProblemError:
            log.exception("the pause could not be ended, trying again in %g s", RESCUE_RETRY_SECONDS)
            self._hold_pause(RESCUE_RETRY_SECONDS)

    def _problem(self, code: ProblemCode, message: str) -> ProblemError:
        return ProblemError(code, message, member=self.fence.identity.pod_name)
