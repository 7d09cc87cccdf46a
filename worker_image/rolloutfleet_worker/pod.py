"""One engine pod: carries out the control calls that its fence accepts, on vLLM and on its ranks."""

import logging

from rolloutfleet.contract.policy import CachePolicy
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import (
    Abort,
    Admit,
    CacheReport,
    Check,
    CheckReport,
    Commit,
    CommitReport,
    Join,
    JoinReport,
    Pause,
    Prepare,
    PrepareReport,
    Receive,
    ReceiveReport,
    ResetCache,
    Resume,
    WorkerReport,
    WorkerState,
)
from rolloutfleet_worker.fence import Fence
from rolloutfleet_worker.peerverbs import PeerVerbs
from rolloutfleet_worker.podbase import ENGINE_CALL_SECONDS, PAUSE_GRACE_SECONDS
from rolloutfleet_worker.ranks import RankFailedError
from rolloutfleet_worker.reports import merge_checks, merge_prepares, merge_receives
from rolloutfleet_worker.sleepverbs import SleepVerbs
from rolloutfleet_worker.wire import Frame

log = logging.getLogger(__name__)


class EnginePod(SleepVerbs, PeerVerbs):
    """The control surface's verbs. One that changes anything runs at a time; an abort interrupts a join or a transfer first."""

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

    async def admit(self, call: Admit) -> WorkerReport:
        async with self._act(call):
            self._admit(call.version, call.stale_seconds)
            self.fence = self.fence.hold(call.hold)
            await self._publish_door(self.fence)
        return self.report()

    async def check(self, call: Check) -> CheckReport:
        """Runs beside generation and beside other calls; the weights are not touched."""
        self.fence = self.fence.accept(call).check_begins()
        self._require_engine()
        orders = self._ranks.every_rank(self._check_order(call))
        try:
            answers = await self._order("check", orders, call.deadline_seconds)
        except RankFailedError as failure:
            raise self._problem(ProblemCode.ENGINE_FAILED, f"the manifest could not be checked: {failure}") from failure
        return merge_checks(call.manifest, [answers[rank] for rank in sorted(answers)])

    async def join(self, call: Join) -> JoinReport:
        async with self._act(call):
            self.fence = self.fence.join_begins()
            orders: dict[int, Frame] = {
                local: {
                    "epoch": call.epoch,
                    "transport": call.transport,
                    "wire": call.wire,
                    "rendezvous": call.rendezvous.model_dump(mode="json"),
                    "trainer_ranks": call.trainer_ranks,
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
                raise self._problem(self._code_of(failure, ProblemCode.MEMBER_ABSENT), str(failure)) from failure
            self.fence = self.fence.join_done()
        return JoinReport(ranks=tuple(answers[local]["rank"] for local in range(self._rank_count)))

    async def prepare(self, call: Prepare) -> PrepareReport:
        """Runs while the engine serves; a failure leaves the engine as it was."""
        async with self._act(call):
            self.fence = self.fence.prepare_begins(staged=call.staged)
            body = {
                "manifest_digest": call.manifest_digest,
                "layouts": call.layouts,
                "staged": call.staged,
                "timeout_seconds": call.deadline_seconds,
            }
            try:
                answers = await self._order("prepare", self._ranks.every_rank(body), call.deadline_seconds)
            except RankFailedError as failure:
                code = self._code_of(failure, ProblemCode.TRANSFER_FAILED)
                raise self._problem(code, f"the transfer could not be prepared: {failure}") from failure
        return merge_prepares(list(answers.values()))

    async def pause(self, call: Pause) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.pause_begins()
            if not self.fence.asleep:
                if (
                    not self.fence.staged
                ):  # else the time that it is kept for, told with it, holds for the pause and what follows too
                    # vLLM stops scheduling at once, long before a pause that waits for requests is answered.
                    self._hold(call.deadline_seconds + PAUSE_GRACE_SECONDS)
                await self._pause_engine(call.mode, call.deadline_seconds)
                self.fence = self.fence.paused()
        return self.report()

    async def receive(self, call: Receive) -> ReceiveReport:
        """A staged version arrives while the engine serves: the door stays where it is, and a failure forgets the staged bytes alone."""
        async with self._act(call):
            was = self.fence
            self.fence = was.receive_begins(call.version, staged=call.staged)
            self._arrived = None
            self._hold(call.deadline_seconds + call.hold_seconds)
            body = {
                "manifest_digest": call.manifest_digest,
                "version": call.version,
                "staged": call.staged,
                "verify": call.verify,
                "timeout_seconds": call.deadline_seconds,
            }
            try:
                await self._publish_door(self.fence)
                answers = await self._order("receive", self._ranks.every_rank(body), call.deadline_seconds)
            except RankFailedError as failure:
                await self._transfer_failed(was, touched=failure.touched and not call.staged, message=str(failure))
                raise self._problem(self._code_of(failure, ProblemCode.TRANSFER_FAILED), str(failure)) from failure
            except ProblemError as problem:
                await self._transfer_failed(was, touched=not call.staged, message=str(problem))
                raise
            self.fence = self.fence.receive_done()
            self._note_arrived(call.version, answers[0])
        return merge_receives(call.version, [answers[rank] for rank in sorted(answers)])

    async def commit(self, call: Commit) -> CommitReport:
        """The cache goes before the version is called whole: whatever fails in between leaves the worker fenced."""
        async with self._act(call):
            self.fence = self.fence.commit_begins(call.version)
            if self._has_adapter_for(call.version):
                self._cache_reset_for = call.version
                return await self._commit_adapter(call)
            if self.fence.swaps_for(call.version):
                return await self._swap(call)
            reset = None if call.cache is CachePolicy.KEEP else await self._reset_cache_for(call.version)
            if reset is not False:
                await self._serve_arrived(call.version)
                self.fence = self.fence.committed(call.version)
            await self._publish_door(self.fence)
        return CommitReport(version=call.version, cache_reset=reset, state=self.fence.state)

    async def resume(self, call: Resume) -> WorkerReport:
        """An engine that sleeps in part stays stopped until it is wholly awake."""
        async with self._act(call):
            self.fence = self.fence.resume_begins()
            if self.fence.asleep:
                self._release_hold()
            else:
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

    async def _swap(self, call: Commit) -> CommitReport:
        """Copy the staged version into the live weights between two steps; only a whole copy with its cache treated serves on."""
        serving = self.fence.state is WorkerState.SERVING
        self.fence = self.fence.swap_begins()
        reset = call.cache is not CachePolicy.KEEP
        try:
            swapped = await self._engine.swap(
                call.version, reset_cache=reset, pause=serving, deadline_seconds=ENGINE_CALL_SECONDS
            )
        except ProblemError as problem:
            self.fence = self.fence.swap_failed(str(problem))
            if problem.code is ProblemCode.DEADLINE_EXCEEDED:
                # It may still come about, and resume the engine, at any later moment.
                self._kill()
            else:
                await self._publish_door(self.fence)
            raise
        self.fence = self.fence.swap_done()
        if swapped.cache_reset is False:
            self.fence = self.fence.cache_not_reset(call.version, "vLLM answered no")
        else:
            self.fence = self.fence.committed(call.version, serving=serving)
            self._cache_reset_for = call.version if reset else self._cache_reset_for
        await self._publish_door(self.fence)
        if self.fence.state is WorkerState.SERVING:
            self._release_hold()
        return CommitReport(
            version=call.version,
            cache_reset=swapped.cache_reset,
            state=self.fence.state,
            pause_seconds=swapped.pause_seconds if serving else None,
        )

    async def _transfer_failed(self, was: Fence, *, touched: bool, message: str) -> None:
        self.fence = self.fence.receive_failed(touched=touched, was=was, message=message)
        if self.fence.state is WorkerState.SERVING:
            self._release_hold()
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
