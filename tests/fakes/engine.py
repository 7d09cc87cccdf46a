"""A fake engine: the worker's real control verbs and fence over a vLLM and ranks that hold a version and a digest."""

import asyncio
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from rolloutfleet.contract.adapter import AdapterSpec, HeldAdapter, manifest_key
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.policy import PauseMode, Transport
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Call, Locality, SleepLevel, WakeTag, WorkerReport, WorkerState
from rolloutfleet_worker.fence import Fence, Identity
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.podbase import Swapped
from rolloutfleet_worker.ranks import RankFailedError

SWAP_SECONDS = 0.004
ADAPTER_SECONDS = 0.002


class FakeVllm:
    """Pauses, resumes, swaps, sleeps and drops its cache as told."""

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

    async def swap(self, version: int, *, reset_cache: bool, pause: bool, deadline_seconds: float) -> Swapped:
        engine = self._engine
        assert engine.staged_weights is not None
        assert engine.staged_weights[0] == version
        engine.weights, engine.staged_weights, self.stale_cache = engine.staged_weights, None, True
        return Swapped(await self.reset_cache(deadline_seconds) if reset_cache else None, SWAP_SECONDS)

    async def serve_adapter(self, name: str, version: int, deadline_seconds: float) -> float:
        engine = self._engine
        if engine.staged_weights is not None:
            engine.weights, engine.staged_weights = engine.staged_weights, None
        engine.adapters[name] = version
        return ADAPTER_SECONDS

    async def withdraw_adapters(self, names: Sequence[str], deadline_seconds: float) -> None:
        for name in names:
            del self._engine.adapters[name]

    async def refuses_sleep(self, deadline_seconds: float) -> str:
        return self._engine.sleep_refusal

    async def sleep(self, level: SleepLevel, deadline_seconds: float) -> None:
        if level is SleepLevel.DISCARD:
            self._engine.weights = None

    async def wake(self, tags: Sequence[WakeTag], deadline_seconds: float) -> None:
        pass


class FakeRanks:
    """Ranks that receive when the test says so."""

    _ports: ClassVar = itertools.count()
    _lenders: ClassVar[WeakValueDictionary[int, "FakeEngine"]] = WeakValueDictionary()

    def __init__(self, engine: "FakeEngine"):
        self._engine = engine
        self._transport = ""
        self._let_go: asyncio.Event | None = None
        self._adapters: dict[str, AdapterSpec] = {}
        self.arrival: asyncio.Future[str] | None = None
        self.began = asyncio.Event()
        """Set once a transfer waits for its end."""
        self.complete = asyncio.Event()
        self.complete.set()

    def described(self, key: str) -> tuple[str, ...]:
        said = {"nccl_version": self._engine.nccl_version, "device": self._engine.device}
        return (said.get(key, ""),) * self._engine.member.ranks

    def every_rank(self, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
        return dict.fromkeys(range(self._engine.member.ranks), body)

    async def order_all(
        self, op: str, bodies: Mapping[int, dict[str, Any]], deadline_seconds: float, *, unblock: str = "abort"
    ) -> dict[int, dict[str, Any]]:
        match op:
            case "receive":
                return await self._receive(bodies)
            case "borrow":
                return await self._borrow(bodies)
            case "lend":
                self._let_go = asyncio.Event()
                await self._let_go.wait()
                return bodies
        return {rank: self._at_once(op, rank, body) for rank, body in bodies.items()}

    def _at_once(self, op: str, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        engine = self._engine
        match op:
            case "check":
                return self._check(rank, body)
            case "join":
                self._transport = body["transport"]
                return {"rank": body["rank"]}
            case "prepare":
                return {"staging_bytes": 38 if body["staged"] else 0, "seconds": 0.0}
            case "shape":
                room = {"copy_bytes": 38, "room_bytes": engine.room_bytes} if body["room"] else {}
                return {"shape": engine.shape, "live_digest": self._live_digest(rank), **room}
            case "offer":
                port = 1024 + next(self._ports) % 60000
                self._lenders[port] = engine
                return {"host": "127.0.0.1", "port": port}
            case "free" | "unmap":
                return {}
        raise AssertionError(f"ranks know no order {op}")

    def _check(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        model = self._engine.tensors
        if body["adapter"] is not None:
            return self._check_adapter(body)
        sent = {tensor["name"] for tensor in body["manifest"]["tensors"]}
        missing, extra = ([], []) if model is None else (sorted(model - sent), sorted(sent - model))
        self._manifest = Manifest.model_validate(body["manifest"])
        faults = {"missing": missing, "extra": extra, "misshapen": [], "consumed": {}}
        return faults | {"layout": self._layout(rank)}

    def _check_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        spec = AdapterSpec.model_validate(body["adapter"])
        self._manifest = Manifest.model_validate(body["manifest"])
        self._adapters[manifest_key(self._manifest.digest(), spec)] = spec
        faults: dict[str, Any] = {"missing": [], "extra": [], "misshapen": [], "consumed": {}}
        nbytes = self._manifest.nbytes
        return faults | {
            "layout": {"digest": "file", "shape": "", "placed_bytes": 0, "detoured_bytes": nbytes, "room_bytes": 0}
        }

    def _layout(self, rank: int) -> dict[str, Any]:
        placed = self._engine.calibrated
        nbytes = self._manifest.nbytes
        return {
            "digest": f"placed-{rank}" if placed else "detoured",
            "shape": self._engine.shape,
            "placed_bytes": nbytes if placed else 0,
            "detoured_bytes": 0 if placed else nbytes,
            "detours": () if placed else ("2 tensors: not yet compared with a load through vLLM's loader",),
            "room_bytes": self._engine.room_bytes,
        }

    def _live_digest(self, rank: int, *, staged: bool = False) -> str:
        held = self._engine.staged_weights if staged else self._engine.weights
        version, digest = held or (0, "mixture")
        return f"{digest or version}-{rank}"

    async def _receive(self, bodies: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        engine = self._engine
        version = engine.fence.version_in_flight
        staged = bodies[0]["staged"]
        if not staged:
            engine.weights, engine.vllm.stale_cache = None, True
        self.arrival = asyncio.get_running_loop().create_future()
        self.began.set()
        digest = await self.arrival
        if engine.corrupts:
            digest = hashlib.sha256(digest.encode()).hexdigest()
        if staged:
            engine.staged_weights = (version, digest)
        else:
            engine.weights = (version, digest)
        adapter = self._adapters.get(bodies[0]["manifest_digest"])
        if adapter is not None:
            held = HeldAdapter(spec=adapter, version=version, nbytes=1, sha256=digest).model_dump(mode="json")
            return {rank: self._received(rank, digest, learned=False) | {"adapter": held} for rank in bodies}
        learned = Transport(self._transport).by_layout and not engine.calibrated
        engine.calibrated = engine.calibrated or learned
        return {rank: self._received(rank, digest, learned=learned) for rank in bodies}

    def _received(self, rank: int, digest: str, *, learned: bool) -> dict[str, Any]:
        return {
            "tensors": len(self._manifest.tensors),
            "nbytes": self._manifest.nbytes,
            "received_digest": digest,
            "live_digest": f"{digest}-{rank}",
            "layout": self._layout(rank),
            "layout_changed": learned,
            "receive_seconds": 0.1,
            "load_seconds": 0.1,
        }

    async def _borrow(self, bodies: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        engine = self._engine
        staged = bool(bodies[0]["staged"])
        if not staged:
            engine.weights, engine.vllm.stale_cache = None, True
        engine.borrowing.set()
        await engine.may_borrow.wait()
        donor = self._lenders.get(bodies[0]["rendezvous"]["port"])
        if donor is None or not donor.fence.lending or engine.peer_fails:
            raise RankFailedError(f"{engine.name}: the lender is gone", touched=not staged)
        if staged:
            engine.staged_weights = donor.weights
        else:
            engine.weights = donor.weights
        donor.ranks.let_go()
        blank = {"tensors": 0, "nbytes": 38, "received_digest": "", "layout": None, "layout_changed": False}
        seconds = {"receive_seconds": 0.1, "load_seconds": 0.0}
        return {rank: blank | seconds | {"live_digest": self._live_digest(rank, staged=staged)} for rank in bodies}

    def let_go(self) -> None:
        if self._let_go is not None:
            self._let_go.set()

    async def let_go_all(self) -> None:
        self.let_go()

    async def abort_all(self) -> None:
        self.let_go()
        self._engine.break_transfer("the transfer was aborted")
        if not self._engine.may_borrow.is_set():
            self._engine.peer_fails = True
            self._engine.may_borrow.set()


@dataclass(eq=False)
class FakeEngine:
    """One launcher process and its engine, from its start to its end."""

    member: Member
    instance: str
    fleet_uid: str = "fleet-uid"
    environment: dict[str, str] = field(default_factory=dict)
    nccl_version: str = ""
    device: str = "cpu"
    locality: Locality = field(default_factory=Locality)
    room_bytes: int = 1 << 30
    """Room for a second copy of the weights."""
    shape: str = "shape"
    calibrated: bool = False
    """Whether the layout has been compared with a load."""
    tensors: frozenset[str] | None = None
    """Names that the model has; None accepts every manifest."""
    cache_answer: bool = True
    cache_fails: bool = False
    """vLLM answers a cache reset with an error."""
    corrupts: bool = False
    peer_fails: bool = False
    """What is borrowed does not arrive."""
    sleep_refusal: str = ""
    weights: tuple[int, str] | None = (0, "")
    """Version and digest of what is in memory; None while it is a mixture."""
    staged_weights: tuple[int, str] | None = None
    """Version and digest of what lies in the second buffer."""
    adapters: dict[str, int] = field(default_factory=dict)
    """By name of each adapter that requests may ask for, its version."""
    calls: list[tuple[str, Call]] = field(default_factory=list)

    def __post_init__(self):
        identity = Identity("f", self.fleet_uid, self.member.pod_name, self.member.pod_uid, self.instance)
        self.borrowing = asyncio.Event()
        self.may_borrow = asyncio.Event()
        self.may_borrow.set()
        self.vllm, self.ranks = FakeVllm(self), FakeRanks(self)
        fence, count = Fence(identity).started(), self.member.ranks
        self._pod = EnginePod(
            fence, self.member.engine, self.ranks, count, self.vllm, self._killed, self.environment, self.locality
        )

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
        verb = {"ResetCache": "reset_cache", "LetGo": "let_go"}.get(name, name.lower())
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

    def break_transfer(self, message: str, *, cut_off: bool = True) -> None:
        """End the transfer half way; another party is to blame unless told otherwise."""
        if self.ranks.arrival is not None and not self.ranks.arrival.done():
            self.ranks.arrival.set_exception(RankFailedError(f"{self.name}: {message}", touched=True, cut_off=cut_off))

    def _killed(self) -> None:
        raise AssertionError(f"{self.name} could not be unblocked")
