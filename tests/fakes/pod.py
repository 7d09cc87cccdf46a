"""An engine pod without vLLM: real control surface, fence and rank links over rank operations that only pretend."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp.test_utils import TestClient, TestServer

from rolloutfleet.contract.policy import PauseMode
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.worker import Locality
from rolloutfleet_worker.control import make_application
from rolloutfleet_worker.fence import Door, Fence, Identity
from rolloutfleet_worker.pod import EnginePod
from rolloutfleet_worker.podbase import Swapped
from rolloutfleet_worker.rank.link import RankError, RankLink
from rolloutfleet_worker.ranks import Ranks

LAYOUT = {"digest": "layout", "shape": "shape", "placedBytes": 12, "detouredBytes": 4, "roomBytes": 1000}
RENDEZVOUS = {"host": "127.0.0.1", "port": 1}
JOIN = {
    "transport": "Layout",
    "wire": "Gloo",
    "rendezvous": RENDEZVOUS,
    "trainerRanks": 2,
    "rankOffset": 3,
    "worldSize": 5,
    "deadlineSeconds": 5,
}


class RankDouble:
    """Rank operations that hold no weights; ``receive`` blocks until aborted where told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.failure: Exception | None = None
        self.blocks = False
        self.entered = threading.Event()
        self.aborted = threading.Event()
        self.joined_as: int | None = None
        self.orders: list[tuple[str, dict]] = []
        self.layout_changed = False
        self.seconds = 0.1
        self.adapter: dict | None = None
        self.lent = threading.Event()
        self.room_bytes = 1000
        self.digesting: threading.Event | None = None
        """Where given, set when the live weights are being digested, which then takes until it is cancelled."""

    def describe(self):
        return {"vllm_version": "0.32.0", "nccl_version": "", "device": "cpu"}

    def check(self, body):
        return {"missing": ["model.norm.weight"], "extra": [], "misshapen": [], "consumed": {}, "layout": LAYOUT}

    def join(self, body, cancelled):
        self.orders.append(("join", body))
        self.joined_as = body["rank"]
        return {"rank": body["rank"]}

    def prepare(self, body, cancelled):
        self.orders.append(("prepare", body))
        if self.failure:
            raise self.failure
        return {"staging_bytes": 100, "seconds": self.seconds}

    def free(self):
        self.orders.append(("free", {}))
        return {}

    def unmap(self):
        self.orders.append(("unmap", {}))
        return {}

    def shape(self, body, cancelled):
        if self.digesting is not None:
            self.digesting.set()
            assert cancelled.wait(20)
            raise RankError(f"local rank {self.rank}: the digest of the live weights is not wanted any more")
        room = {"copy_bytes": 100, "room_bytes": self.room_bytes} if body["room"] else {}
        return {"shape": f"shape-{self.rank}", "live_digest": f"live-{self.rank}", **room}

    def offer(self, body):
        return {"host": "127.0.0.1", "port": 7}

    def lend(self, body, cancelled):
        self.orders.append(("lend", body))
        self.entered.set()
        self.lent.wait(20)
        return {}

    def borrow(self, body, cancelled):
        self.orders.append(("borrow", body))
        return self.receive(body, cancelled)

    def let_go(self):
        self.lent.set()

    def receive(self, body, cancelled):
        self.orders.append(("receive", body))
        if self.blocks:
            self.entered.set()
            self.aborted.wait(20)
            raise RankError(f"rank {self.rank}: aborted", touched=True, cut_off=True)
        if self.failure:
            raise self.failure
        return {
            "tensors": 1,
            "nbytes": 16,
            "received_digest": f"received-{self.rank}",
            "live_digest": f"live-{self.rank}",
            "layout": LAYOUT,
            "layout_changed": self.layout_changed,
            "receive_seconds": self.seconds,
            "load_seconds": 0.2,
            "adapter": self.adapter,
        }

    def abort(self):
        self.aborted.set()
        self.lent.set()


class EngineDouble:
    """Records what the pod asks of vLLM."""

    def __init__(self) -> None:
        self.paused = False
        self.cache_resets: bool | Exception = True
        self.resets = 0
        self.door = Door.CLOSED
        self.version = 0
        self.swaps: list[tuple[int, bool, bool]] = []
        self.swap_answer: Swapped | ProblemError | None = None
        self.sleep_refusal = ""
        self.slept: list[str] = []
        self.adapters: dict[str, int] = {}
        self.adapter_failure: ProblemError | None = None

    async def serve_adapter(self, name: str, version: int, deadline_seconds: float):
        if self.adapter_failure:
            raise self.adapter_failure
        self.adapters[name] = version
        return 0.002

    async def withdraw_adapters(self, names, deadline_seconds: float):
        for name in names:
            del self.adapters[name]

    async def swap(self, version: int, *, reset_cache: bool, pause: bool, deadline_seconds: float):
        self.swaps.append((version, reset_cache, pause))
        if isinstance(self.swap_answer, ProblemError):
            raise self.swap_answer
        return self.swap_answer or Swapped(cache_reset=True if reset_cache else None, pause_seconds=0.008)

    async def refuses_sleep(self, deadline_seconds: float):
        return self.sleep_refusal

    async def sleep(self, level, deadline_seconds: float):
        self.slept.append(f"sleep {level:d} behind a door {self.door}")

    async def wake(self, tags, deadline_seconds: float):
        self.slept.append(f"wake {' '.join(tags)}")

    async def pause(self, mode: PauseMode, deadline_seconds: float):
        self.paused = True

    async def resume(self, deadline_seconds: float):
        self.paused = False

    async def reset_cache(self, deadline_seconds: float):
        self.resets += 1
        if isinstance(self.cache_resets, Exception):
            raise self.cache_resets
        return self.cache_resets

    async def set_door(self, door, *, version, reason, deadline_seconds):
        self.door, self.version = door, version


class Pod:
    def __init__(
        self, client: TestClient, ranks: list[RankDouble], engine: EngineDouble, pod: EnginePod, killed: list
    ) -> None:
        self.client, self.ranks, self.engine, self.pod, self.killed = client, ranks, engine, pod, killed

    async def call(self, verb: str, *, token: str = "token", **body):
        body = {"fleetUid": "fleet-uid", "podUid": "pod-uid", "instance": "one", "epoch": 1, **body}
        async with self.client.post(
            f"/rolloutfleet/v1/worker/{verb}", json=body, headers={"Authorization": f"Bearer {token}"}
        ) as response:
            return response.status, await response.json()

    async def ready(self):
        async with self.client.get("/healthz/ready") as response:
            return response.status == 200, (await response.json())["reason"]

    async def paused_and_joined(self):
        await self.joined()
        await self.call("pause", mode="Keep", deadlineSeconds=30)

    async def receive(self, deadline: float = 10):
        return await self.call("receive", version=1, manifestDigest="m", deadlineSeconds=deadline, holdSeconds=30)

    async def joined(self):
        await self.call("admit", version=0)
        await self.call("join", **JOIN)

    async def stage(self, *, deadline: float = 10, hold: float = 30):
        return await self.call(
            "receive", version=1, manifestDigest="m", staged=True, deadlineSeconds=deadline, holdSeconds=hold
        )

    def ordered(self, op: str) -> list[dict]:
        return [body for rank in self.ranks for name, body in rank.orders if name == op]


@asynccontextmanager
async def running_pod(folder: Path) -> AsyncIterator[Pod]:
    """A pod of two ranks, started and not yet admitted."""
    doubles = [RankDouble(0), RankDouble(1)]
    engine = EngineDouble()
    ranks = Ranks(2, lambda rank: None)
    await ranks.listen(folder / "ranks.sock")
    links = [RankLink(str(folder / "ranks.sock"), double) for double in doubles]
    for link in links:
        await asyncio.to_thread(link.start)
    await ranks.complete.wait()
    identity = Identity(fleet="f", fleet_uid="fleet-uid", pod_name="f-0-0-0", pod_uid="pod-uid", instance="one")
    killed: list[bool] = []
    engine_pod = EnginePod(
        Fence(identity=identity), 0, ranks, 2, engine, lambda: killed.append(True), {}, Locality(host="h", memory="m")
    )
    await engine_pod.started()
    client = TestClient(TestServer(make_application(engine_pod, "token", lambda: "")))
    await client.start_server()
    try:
        yield Pod(client, doubles, engine, engine_pod, killed)
    finally:
        await client.close()
        for link in links:
            link.stop()
        await ranks.close()
