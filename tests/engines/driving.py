"""The sync job's and the trainer's part in this process, one control call at a time: refits of engines whose middle a test wants to see."""

import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from tests.engines.hostfleet import TOKEN, Launched

from rolloutfleet.contract.adapter import AdapterSpec, manifest_key
from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.trainer import TrainerJoin, TrainerPrepare, TrainerSend
from rolloutfleet.delivery import Cargo, Seat
from rolloutfleet.rank import TrainerRank
from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.sources import source_of
from rolloutfleet.transport.store import host_store

SECONDS = 60.0
_ANYTHING = {"unread": torch.zeros(1)}
_epochs = itertools.count(1)


class Refused(Exception):  # noqa: N818 - what a test expects
    """A worker's answer that is no success."""

    def __init__(self, verb: str, code: str, message: str) -> None:
        super().__init__(f"{verb}: {code}: {message}")
        self.code = code


def call(engine: Launched, verb: str, **body: Any) -> dict[str, Any]:
    """The answer of one control call.

    Raises:
        Refused: with the problem's code and words.
    """
    header = {"fleetUid": "fleet-uid", "podUid": f"pod-{engine.engine}-uid", "instance": engine.report().instance}
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.control_port}/rolloutfleet/v1/worker/{verb}",
        data=json.dumps({**header, **body}).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=3 * SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as refusal:
        problem = json.load(refusal)
        raise Refused(verb, problem["code"], problem["message"]) from None


class Epoch:
    """One trainer process and some engines in one group; ends with :meth:`close`."""

    def __init__(
        self,
        engines: Sequence[Launched],
        wire: Wire = Wire.GLOO,
        transport: Transport = Transport.LAYOUT,
        *,
        after: int = 0,
    ) -> None:
        """The number is above ``after``, which engines may have seen of a sync job."""
        self.engines = engines
        self.number = max(next(_epochs), after + 1)
        self.layouts: list[dict[str, Any]] = []
        self.adapter: AdapterSpec | None = None
        """What the tensors are, where they are not the model's."""
        self._cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=len(engines) + 1)
        listening = hold_listening_socket("127.0.0.1")
        self._port = listening.getsockname()[1]
        store = host_store(listening, SECONDS)
        self.trainer = TrainerRank(Seat(store=store, session=f"session-{self.number}", rank=0, ranks=1, gpu=None))
        world = 1 + sum(engine.ranks for engine in engines)
        offset = 1
        joins = []
        for engine in engines:
            body = {
                "transport": transport,
                "wire": wire,
                "rendezvous": {"host": "127.0.0.1", "port": self._port},
                "trainerRanks": 1,
                "rankOffset": offset,
                "worldSize": world,
                "deadlineSeconds": SECONDS,
            }
            joins.append(self.begin(engine, "join", **body))
            offset += engine.ranks
        order = TrainerJoin(
            epoch=self.number,
            transport=transport,
            wire=wire,
            trainer_ranks=1,
            world_size=world,
            deadline_seconds=SECONDS,
        )
        self.trainer.perform(order, cargo_of(_ANYTHING), self._cancelled)
        for join in joins:
            join.result()

    def begin(self, engine: Launched, verb: str, **body: Any) -> "Future[dict[str, Any]]":
        return self._pool.submit(call, engine, verb, epoch=self.number, **body)

    def all(self, verb: str, **body: Any) -> list[dict[str, Any]]:
        """The answers of all engines to the same call, made at once."""
        calls = [self.begin(engine, verb, **body) for engine in self.engines]
        return [each.result() for each in calls]

    def check(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """The layouts of all ranks, in rank order."""
        manifest = cargo_of(tensors).manifest.model_dump(mode="json")
        adapter = None if self.adapter is None else self.adapter.model_dump(mode="json")
        checks = self.all("check", manifest=manifest, adapter=adapter, deadlineSeconds=SECONDS)
        assert not any(any(check["faults"].values()) for check in checks), checks
        self.layouts = [layout for check in checks for layout in check["layouts"]]
        return self.layouts

    def prepare(self, tensors: Mapping[str, torch.Tensor], *, staged: bool) -> list[dict[str, Any]]:
        cargo = cargo_of(tensors)
        self.trainer.load(cargo)
        layouts = tuple(layout["digest"] for layout in self.layouts)
        key = manifest_key(cargo.digest, self.adapter)
        body = {"manifestDigest": key, "layouts": layouts, "staged": staged, "deadlineSeconds": SECONDS}
        prepares = [self.begin(engine, "prepare", **body) for engine in self.engines]
        order = TrainerPrepare(epoch=self.number, layouts=layouts, deadline_seconds=SECONDS)
        self.trainer.perform(order, cargo, self._cancelled)
        return [prepare.result() for prepare in prepares]

    def transfer(self, tensors: Mapping[str, torch.Tensor], version: int, *, staged: bool) -> list[dict[str, Any]]:
        """What every engine received, verified as the sync job does."""
        cargo = cargo_of(tensors, version)
        self.trainer.load(cargo)
        key = manifest_key(cargo.digest, self.adapter)
        body = {"version": version, "manifestDigest": key, "staged": staged}
        deadlines = {"deadlineSeconds": SECONDS, "holdSeconds": SECONDS}
        receives = [self.begin(engine, "receive", **body, **deadlines) for engine in self.engines]
        sent = self.trainer.perform(TrainerSend(epoch=self.number, deadline_seconds=SECONDS), cargo, self._cancelled)
        reports = [receive.result() for receive in receives]
        digests = [digest for report in reports for digest in report["receivedDigests"]]
        assert digests == [sent.digests[layout["digest"]] for layout in self.layouts]
        if any(report["layouts"] for report in reports):
            self.layouts = [layout for report in reports for layout in report["layouts"]]
        return reports

    def refit(self, tensors: Mapping[str, torch.Tensor], version: int) -> list[dict[str, Any]]:
        """A refit into the live weights, prepared anew, from pause to resume."""
        self.check(tensors)
        self.prepare(tensors, staged=False)
        self.all("pause", mode="Keep", deadlineSeconds=SECONDS)
        reports = self.transfer(tensors, version, staged=False)
        self.all("commit", version=version, cache="Reset")
        self.all("resume")
        return reports

    def close(self) -> None:
        self._cancelled.set()
        self.trainer.leave("the test is over")
        for engine in self.engines:
            call(engine, "abort", epoch=max(self.number, engine.report().epoch), reason="the test is over")
        self._pool.shutdown()


def cargo_of(tensors: Mapping[str, torch.Tensor], version: int = 1) -> Cargo:
    source = source_of(dict(tensors), team=False)
    manifest = source.manifest()
    return Cargo(source, manifest, manifest.digest(), version)
