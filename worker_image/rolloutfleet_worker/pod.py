"""One engine pod: carries out the control calls that its fence accepts, on vLLM and on its ranks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol
from uuid import uuid4

from rolloutfleet.contract.manifest import Manifest, ManifestFaults
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
from rolloutfleet_worker.fence import Fence
from rolloutfleet_worker.ranks import RankFailedError, Ranks
from rolloutfleet_worker.wire import Frame

log = logging.getLogger(__name__)

ENGINE_CALL_SECONDS = 30.0
"""How long vLLM may take to resume, to reset its cache or to move its fence."""
ABORT_SECONDS = 10.0
"""How long ranks may take to leave a group before the engine is killed."""


class Engine(Protocol):
    """What the pod needs of vLLM."""

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> None: ...
    async def resume(self, deadline_seconds: float) -> None: ...
    async def reset_cache(self, deadline_seconds: float) -> bool: ...
    async def set_fence(self, *, is_open: bool, version: int, reason: str, deadline_seconds: float) -> None: ...


class EnginePod:
    """The control surface's verbs; one that changes anything runs at a time, but an abort interrupts a transfer."""

    def __init__(
        self, fence: Fence, engine_index: int, ranks: Ranks, rank_count: int, engine: Engine, kill: Callable[[], None]
    ) -> None:
        self.fence = fence
        self.instance = uuid4().hex
        self._engine_index = engine_index
        self._ranks = ranks
        self._rank_count = rank_count
        self._engine = engine
        self._kill = kill
        self._turn = asyncio.Lock()
        self._transport = Transport.GLOO
        self._received_digest = ""
        self._pause_end: asyncio.TimerHandle | None = None
        self._rescue: asyncio.Task[None] | None = None
        self.environment: dict[str, str] = {}

    async def started(self) -> None:
        """vLLM is up: from now on calls are answered."""
        self.fence = self.fence.started()
        await self._publish_fence()

    def failed(self, message: str) -> None:
        self.fence = self.fence.failed(message)

    def report(self) -> WorkerReport:
        fence = self.fence
        up = self._ranks.complete.is_set()
        return WorkerReport(
            fleet_uid=fence.identity.fleet_uid,
            pod_name=fence.identity.pod_name,
            pod_uid=fence.identity.pod_uid,
            instance=self.instance,
            engine=self._engine_index,
            ranks=self._rank_count,
            state=fence.state,
            epoch=fence.epoch,
            version=fence.version,
            version_in_flight=fence.version_in_flight,
            received_digest=self._received_digest if fence.state is WorkerState.RECEIVED else "",
            admitted=fence.admitted,
            vllm_version=self._ranks.described("vllm_version")[0] if up else "",
            nccl_version=self._ranks.described("nccl_version")[0] if up else "",
            devices=self._ranks.described("device") if up else (),
            environment=self.environment,
            message=fence.message or fence.unready_reason(),
        )

    async def admit(self, call: Admit) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.admit(call.version)
            await self._publish_fence()
        return self.report()

    async def check(self, call: Check) -> CheckReport:
        """Runs beside generation; the weights are not touched."""
        async with self._act(call):
            order = self._ranks.every_rank({"manifest": call.manifest.model_dump(mode="json")})
            try:
                answers = await self._ranks.order_all("check", order, 600.0)
            except RankFailedError as failure:
                raise ProblemError(
                    ProblemCode.ENGINE_FAILED, f"the manifest could not be checked: {failure}"
                ) from failure
        return merge_checks(call.manifest, list(answers.values()))

    async def join(self, call: Join) -> JoinReport:
        async with self._act(call):
            self.fence = self.fence.join_begins()
            self._transport = call.transport
            orders: dict[int, Frame] = {
                local: {
                    "epoch": call.epoch,
                    "transport": call.transport,
                    "rendezvous": call.rendezvous.model_dump(),
                    "rank_offset": call.rank_offset,
                    "rank": call.rank_offset + local,
                    "world_size": call.world_size,
                    "timeout_seconds": call.deadline_seconds,
                }
                for local in range(self._rank_count)
            }
            answers = await self._order("join", orders, call.deadline_seconds)
            self.fence = self.fence.join_done()
        return JoinReport(ranks=tuple(answers[local]["rank"] for local in range(self._rank_count)))

    async def pause(self, call: Pause) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.pause_begins()
            await self._engine.pause(call.mode, call.deadline_seconds)
            self.fence = self.fence.paused()
            self._extend_pause(call.deadline_seconds)
        return self.report()

    async def receive(self, call: Receive) -> ReceiveReport:
        async with self._act(call):
            was = self.fence.state
            self.fence = self.fence.receive_begins(call.version)
            self._extend_pause(call.deadline_seconds)
            body = {
                "manifest": call.manifest.model_dump(mode="json"),
                "transport": self._transport,
                "timeout_seconds": call.deadline_seconds,
            }
            try:
                answers = await self._order("receive", self._ranks.every_rank(body), call.deadline_seconds)
            except RankFailedError as failure:
                self.fence = self.fence.receive_failed(touched=failure.touched, was=was, message=str(failure))
                await self._publish_fence()
                raise ProblemError(
                    ProblemCode.TRANSFER_FAILED, str(failure), member=self.fence.identity.pod_name
                ) from failure
            except ProblemError as problem:
                self.fence = self.fence.receive_failed(touched=True, was=was, message=str(problem))
                await self._publish_fence()
                raise
            self.fence = self.fence.receive_done()
            self._extend_pause(ENGINE_CALL_SECONDS)
            report = _merge_receives(call.version, [answers[rank] for rank in sorted(answers)])
            self._received_digest = report.received_digest
        return report

    async def commit(self, call: Commit) -> CommitReport:
        async with self._act(call):
            fresh = self.fence.state is WorkerState.RECEIVED
            self.fence = self.fence.commit(call.version)
            reset: bool | None = None
            if call.cache is CachePolicy.RESET and fresh:
                reset = await self._engine.reset_cache(ENGINE_CALL_SECONDS)
                if not reset:
                    self.fence = self.fence.cache_not_reset()
            elif call.cache is CachePolicy.RESET:
                reset = True
            await self._publish_fence()
            self._extend_pause(ENGINE_CALL_SECONDS)
        return CommitReport(version=call.version, cache_reset=reset)

    async def resume(self, call: Resume) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.resume_begins()
            await self._resume()
        return self.report()

    async def abort(self, call: Abort) -> WorkerReport:
        """Unblocks a transfer in flight first, then waits for it to have ended."""
        self.fence = self.fence.accept(call)
        await self._leave_group()
        async with self._turn:
            self.fence = self.fence.aborted(call.reason)
            await self._publish_fence()
            if self.fence.resumable:
                await self._resume()
        return self.report()

    async def reset_cache(self, call: ResetCache) -> CacheReport:
        async with self._act(call):
            return CacheReport(cache_reset=await self._engine.reset_cache(ENGINE_CALL_SECONDS))

    @asynccontextmanager
    async def _act(self, call: Call) -> AsyncIterator[None]:
        self.fence.accept(call)
        async with self._turn:
            self.fence = self.fence.accept(call)
            if self.fence.state in {WorkerState.STARTING, WorkerState.FAILED}:
                raise ProblemError(ProblemCode.WRONG_STATE, f"this worker is {self.fence.state}: {self.fence.message}")
            yield

    async def _order(self, op: str, orders: dict[int, Frame], deadline_seconds: float) -> dict[int, Frame]:
        """Order all ranks; when one fails or the deadline passes, the others are unblocked before this returns."""
        pending = asyncio.ensure_future(self._ranks.order_all(op, orders, deadline_seconds + ABORT_SECONDS))
        deadline = asyncio.get_running_loop().time() + deadline_seconds
        try:
            await asyncio.wait({pending}, timeout=deadline - asyncio.get_running_loop().time())
            if not pending.done():
                await self._leave_group()
            try:
                return await pending
            except TimeoutError as error:
                self._kill()
                raise ProblemError(
                    ProblemCode.DEADLINE_EXCEEDED,
                    f"{op} did not end within {deadline_seconds:g} s and could not be aborted; the engine is restarted",
                    member=self.fence.identity.pod_name,
                ) from error
            except RankFailedError as failure:
                if op != "receive":
                    raise ProblemError(
                        ProblemCode.MEMBER_ABSENT, str(failure), member=self.fence.identity.pod_name
                    ) from failure
                raise
        finally:
            pending.cancel()

    async def _leave_group(self) -> None:
        try:
            await self._ranks.order_all("abort", self._ranks.every_rank({}), ABORT_SECONDS)
        except TimeoutError:
            log.critical("ranks did not leave their group within %g s; the engine is killed", ABORT_SECONDS)
            self._kill()
        except RankFailedError as failure:
            log.warning("a rank is gone while leaving the group: %s", failure)

    async def _resume(self) -> None:
        await self._engine.resume(ENGINE_CALL_SECONDS)
        self.fence = self.fence.resumed()
        if self._pause_end is not None:
            self._pause_end.cancel()
            self._pause_end = None

    async def _publish_fence(self) -> None:
        reason = self.fence.unready_reason()
        await self._engine.set_fence(
            is_open=not reason, version=self.fence.version, reason=reason, deadline_seconds=ENGINE_CALL_SECONDS
        )

    def _extend_pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self._pause_end is not None:
            until = max(until, self._pause_end.when())
            self._pause_end.cancel()
        self._pause_end = loop.call_at(until, self._pause_forgotten)

    def _pause_forgotten(self) -> None:
        self._rescue = asyncio.create_task(self._end_forgotten_pause(), name="forgotten-pause")

    async def _end_forgotten_pause(self) -> None:
        """A sync job that vanished must not leave an engine paused for ever: whole weights go on serving, others stay fenced."""
        log.error("the sync job has let a pause pass its deadline; this worker leaves the group")
        await self._leave_group()
        async with self._turn:
            self.fence = self.fence.aborted("the sync job let the pause pass its deadline")
            await self._publish_fence()
            if self.fence.resumable:
                await self._resume()


def merge_checks(manifest: Manifest, answers: list[Frame]) -> CheckReport:
    """One report from every rank's: a tensor of which only part is used on all ranks together has the wrong shape."""
    missing = sorted({name for answer in answers for name in answer["missing"]})
    extra = sorted({name for answer in answers for name in answer["extra"]})
    misshapen = {sentence.split()[1]: sentence for answer in answers for sentence in answer["misshapen"]}
    ignored = []
    for spec in manifest.tensors:
        if spec.name in extra or spec.name in misshapen:
            continue
        used = sum(answer["consumed"].get(spec.name, spec.elements) for answer in answers)
        if used == 0 and spec.elements:
            ignored.append(spec.name)
        elif used < spec.elements:
            misshapen[spec.name] = (
                f"tensor {spec.name} has shape {list(spec.shape)}, the model takes only {used} of its {spec.elements} elements"
            )
    faults = ManifestFaults(
        missing=tuple(missing), extra=tuple(extra), misshapen=tuple(misshapen[name] for name in sorted(misshapen))
    )
    return CheckReport(faults=faults, ignored=tuple(ignored))


def _merge_receives(version: int, answers: list[Frame]) -> ReceiveReport:
    digests = sorted({str(answer["received_digest"]) for answer in answers})
    return ReceiveReport(
        version=version,
        tensors=answers[0]["tensors"],
        nbytes=answers[0]["nbytes"],
        received_digest=digests[0] if len(digests) == 1 else " and ".join(digests),
        live_digests=tuple(answer["live_digest"] for answer in answers),
        receive_seconds=max(answer["receive_seconds"] for answer in answers),
        load_seconds=max(answer["load_seconds"] for answer in answers),
    )
