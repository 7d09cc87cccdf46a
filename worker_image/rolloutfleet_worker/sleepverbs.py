"""Sleep and wake: vLLM gives its device memory away and takes it back, and nothing generates in between."""

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Sleep, Wake, WorkerReport
from rolloutfleet_worker.podbase import ENGINE_CALL_SECONDS, PodBase
from rolloutfleet_worker.ranks import RankFailedError


class SleepVerbs(PodBase):
    """Both are idempotent: what sleeps already at this level, or is awake already, is left alone."""

    async def sleep(self, call: Sleep) -> WorkerReport:
        """The door closes first, so that requests in flight end with 503 and their client asks another engine."""
        async with self._act(call):
            self.fence = self.fence.sleep_begins(call.level)
            if not self.fence.asleep:
                await self._fall_asleep(call)
        return self.report()

    async def wake(self, call: Wake) -> WorkerReport:
        async with self._act(call):
            self.fence = self.fence.wake_begins()
            tags = (frozenset(call.tags) or self.fence.asleep) & self.fence.asleep
            if tags:
                await self._unmap(call.deadline_seconds)
                try:
                    await self._engine.wake(sorted(tags), call.deadline_seconds)
                except ProblemError:
                    # What is on the device now and what is not, only vLLM knows: a refit could write where no memory is.
                    self._kill()
                    raise
                self.fence = self.fence.woken(tags)
                await self._publish_door(self.fence)
        return self.report()

    async def _fall_asleep(self, call: Sleep) -> None:
        if refusal := await self._engine.refuses_sleep(ENGINE_CALL_SECONDS):
            raise self._problem(ProblemCode.WRONG_STATE, refusal)
        asleep = self.fence.slept(call.level)
        await self._publish_door(asleep)
        try:
            await self._order("free", self._ranks.every_rank({}), call.deadline_seconds)
        except RankFailedError as failure:
            await self._publish_door(self.fence)
            raise self._problem(
                ProblemCode.ENGINE_FAILED, f"the buffers of transfers could not be freed: {failure}"
            ) from failure
        try:
            await self._engine.sleep(call.level, call.deadline_seconds)
        except ProblemError:
            self._kill()
            raise
        self.fence = asleep

    async def _unmap(self, deadline_seconds: float) -> None:
        """What a trainer has freed since the last refit is free only when no rank maps it any more, and vLLM may want it now."""
        try:
            await self._order("unmap", self._ranks.every_rank({}), deadline_seconds)
        except RankFailedError as failure:
            raise self._problem(
                ProblemCode.ENGINE_FAILED, f"the trainer's memory could not be let go of: {failure}"
            ) from failure
