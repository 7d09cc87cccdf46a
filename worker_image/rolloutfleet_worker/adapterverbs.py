"""The adapters of one pod: those that it serves, and those that have arrived and wait for their commit."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet.contract.adapter import HeldAdapter
from rolloutfleet.contract.problems import ProblemCode
from rolloutfleet.contract.worker import Check, Commit, CommitReport, WorkerState
from rolloutfleet_worker.podbase import ENGINE_CALL_SECONDS, PodBase
from rolloutfleet_worker.wire import Frame


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Adapters that lie in their files, by the version that commits them."""

    version: int
    adapters: tuple[HeldAdapter, ...]
    all_there_are: bool
    """Whether any other that is served is to go."""


class AdapterVerbs(PodBase):
    """An adapter is received beside a serving engine and given to requests at its commit; the base weights are never touched."""

    _arrived: _Arrived | None = None

    def _check_order(self, call: Check) -> Frame:
        adapter = None
        if call.adapter is not None:
            if self.fence.await_first_refit:
                raise self._problem(
                    ProblemCode.WRONG_STATE,
                    f"adapter {call.adapter.name} has no base to go on: this engine started with dummy weights; refit all weights first",
                )
            adapter = call.adapter.model_dump(mode="json")
        return {"manifest": call.manifest.model_dump(mode="json"), "adapter": adapter}

    def _note_arrived(self, version: int, answer: Frame) -> None:
        """Local rank 0 has written a version's adapter down, unless it was no adapter."""
        held = answer.get("adapter")
        if held is not None:
            self._arrived = _Arrived(version, (HeldAdapter.model_validate(held),), all_there_are=False)

    def _note_borrowed(self, version: int, adapters: Sequence[HeldAdapter]) -> None:
        self._arrived = _Arrived(version, tuple(adapters), all_there_are=True)

    def _has_adapter_for(self, version: int) -> bool:
        """Whether committing this version means to serve an adapter that has been received beside the live weights."""
        arrived = self._arrived
        return arrived is not None and arrived.version == version and self.fence.swaps_for(version)

    async def _serve_arrived(self, version: int) -> float:
        """How long no step could run, in seconds, while the engine took over what has arrived for this version."""
        arrived = self._arrived
        if arrived is None or arrived.version != version:
            return 0.0
        seconds = 0.0
        for adapter in arrived.adapters:
            name = adapter.spec.name
            seconds += await self._engine.serve_adapter(name, adapter.version, ENGINE_CALL_SECONDS)
            self._adapters[name] = adapter
        gone = sorted(self._adapters.keys() - {adapter.spec.name for adapter in arrived.adapters})
        if arrived.all_there_are and gone:
            await self._engine.withdraw_adapters(gone, ENGINE_CALL_SECONDS)
            for name in gone:
                del self._adapters[name]
        self._arrived = None
        return seconds

    async def _commit_adapter(self, call: Commit) -> CommitReport:
        """Requests in flight go on with what they began with, and no cache is reset: vLLM keys it by adapter."""
        seconds = await self._serve_arrived(call.version)
        self.fence = self.fence.adapter_committed(call.version)
        await self._publish_door(self.fence)
        if self.fence.state is WorkerState.SERVING:
            self._release_hold()
        return CommitReport(version=call.version, cache_reset=None, state=self.fence.state, pause_seconds=seconds)
