"""A fake engine: the worker's real control verbs and fence over a vLLM and ranks that hold a version and a digest."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Call, WorkerReport, WorkerState
from rolloutfleet_worker.fence import Fence, Identity
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.ranks import RankFailedError


class FakeVllm:
    """Pauses, resumes and drops its cache as told."""

    def __init__(self, engine: "FakeEngine"):
        self._engine = engine
        self.paused = False
        self.stale_cache = False
        """Whether the prefix cache holds values of other weights than those in memory."""

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> None:
        self.paused = True

    async def resume(self, deadline_seconds: float) -> None:
        self.paused = False

    async def reset_cache(self, deadline_seconds: float) -> bool:
        if self._engine.cache_fails:
            raise ProblemError(ProblemCode.ENGINE_FAILED, "vLLM answered reset-cache with 500")
        self.stale_cache = self.stale_cache and not self._engine.cache_answer
        return self._engine.cache_answer

    async def set_door(self, *_: object, **__: object) -> None:
        pass


class FakeRanks:
    """Ranks that receive when the test says so."""

    def __init__(self, engine: "FakeEngine"):
        self._engine = engine
        self.arrival: asyncio.Future[str] | None = None
        self.complete = asyncio.Event()
        self.complete.set()

    def described(self, key: str) -> tuple[str, ...]:
        return (self._engine.nccl_version if key == "nccl_version" else "",)

    def every_rank(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        return dict.fromkeys(range(self._engine.member.ranks), body)

    async def order_all(
        self, op: str, bodies: Mapping[int, dict[str, Any]], deadline_seconds: float
    ) -> dict[int, dict[str, Any]]:
        if op == "receive":
            return await self._receive(bodies)
        return {rank: self._check(body) if op == "check" else {"rank": body["rank"]} for rank, body in bodies.items()}

    def _check(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self._engine.tensors
        sent = {tensor["name"] for tensor in body["manifest"]["tensors"]}
        missing, extra = ([], []) if model is None else (sorted(model - sent), sorted(sent - model))
        return {"missing": missing, "extra": extra, "misshapen": [], "consumed": {}}

    async def _receive(self, bodies: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        engine = self._engine
        version = engine.fence.version_in_flight
        manifest = Manifest.model_validate(bodies[0]["manifest"])
        engine.weights, engine.vllm.stale_cache = None, True
        self.arrival = asyncio.get_running_loop().create_future()
        digest = await self.arrival
        if engine.corrupts:
            digest = hashlib.sha256(digest.encode()).hexdigest()
        engine.weights = (version, digest)
        return {
            rank: {
                "tensors": len(manifest.tensors),
                "nbytes": manifest.nbytes,
                "received_digest": digest,
                "live_digest": f"{digest}-{rank}",
                "receive_seconds": 0.1,
                "load_seconds": 0.1,
            }
            for rank in bodies
        }

    async def abort_all(self) -> None:
        self._engine.break_transfer("the transfer was aborted")


@dataclass
class FakeEngine:
    """One launcher process and its engine, from its start to its end."""

    member: Member
    instance: str
    fleet_uid: str = "fleet-uid"
    environment: dict[str, str] = field(default_factory=dict)
    nccl_version: str = ""
    tensors: frozenset[str] | None = None
    """Names that the model has; None accepts every manifest."""
    cache_answer: bool = True
    cache_fails: bool = False
    """vLLM answers a cache reset with an error."""
    corrupts: bool = False
    weights: tuple[int, str] | None = (0, "")
    """Version and digest of what is in memory; None while it is a mixture."""
    calls: list[tuple[str, Call]] = field(default_factory=list)

    def __post_init__(self):
        identity = Identity("f", self.fleet_uid, self.member.pod_name, self.member.pod_uid, self.instance)
        self.vllm, self.ranks = FakeVllm(self), FakeRanks(self)
        fence, count = Fence(identity).started(), self.member.ranks
        self._pod = EnginePod(fence, self.member.engine, self.ranks, count, self.vllm, self._killed, self.environment)

    @property
    def name(self) -> str:
        return self.member.pod_name

    @property
    def fence(self) -> Fence:
        return self._pod.fence

    @fence.setter
    def fence(self, fence: Fence) -> None:
        self._pod.fence = fence

    @property
    def serves(self) -> bool:
        """Whether the engine generates for the fleet's users."""
        return self.fence.state is WorkerState.SERVING and not self.fence.unready_reason()

    def report(self) -> WorkerReport:
        return self._pod.report()

    async def handle(self, call: Call) -> Any:
        """The launcher's answer; raises ProblemError as it answers a problem. A receive ends with the transfer."""
        name = type(call).__name__
        verb = "reset_cache" if name == "ResetCache" else name.lower()
        self.calls.append((name, call))
        return await getattr(self._pod, verb)(call)

    @property
    def receiving(self) -> bool:
        """Whether a transfer waits for :meth:`arrive` or :meth:`break_transfer`."""
        return self.ranks.arrival is not None and not self.ranks.arrival.done()

    def arrive(self, digest: str) -> None:
        """Everything that was sent has arrived."""
        if self.ranks.arrival is not None and not self.ranks.arrival.done():
            self.ranks.arrival.set_result(digest)

    def break_transfer(self, message: str) -> None:
        """End the transfer half way."""
        if self.ranks.arrival is not None and not self.ranks.arrival.done():
            self.ranks.arrival.set_exception(RankFailedError(f"{self.name}: {message}", touched=True))

    def _killed(self) -> None:
        raise AssertionError(f"{self.name} could not be unblocked")
