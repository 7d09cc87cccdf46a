"""The parties of one fleet, put together by a supervisor that plays the operator: API server, sync job, engines, trainers and a load."""

import contextlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.chaos.api import FLEET, NAMESPACE
from benchmarks.chaos.api import PORT as API_PORT
from benchmarks.chaos.network import Network, Plug
from benchmarks.chaos.parties import Kubelet, Party, await_that
from benchmarks.chaos.standing import Standing, report_of
from benchmarks.record import ROOT
from rolloutfleet.contract.policy import PauseMode, RefitDeadlines, RefitPolicy, Staging, Transport
from rolloutfleet.contract.worker import WorkerReport

TOKEN = "token-of-the-chaos"
LEASE_SECONDS = 5.0
RETRY_SECONDS = 0.3
TRAINER_MEGABITS = 200
"""What leaves the trainer is throttled to this, so that a transfer of 8 MB lasts as long as one of gigabytes would."""
DAWDLE = {"join": 0.05, "prepare": 0.05}
API_WRITE_SECONDS = 0.03
DEADLINES = RefitDeadlines(
    forming_seconds=30,
    preparing_seconds=10,
    pausing_seconds=10,
    transferring_seconds=15,
    verifying_seconds=10,
    committing_seconds=15,
    resuming_seconds=10,
)
START_SECONDS = 60.0
_TORCHRUN = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "another",
}
"""What a trainer that torchrun has started finds in its environment: another group's store, which nobody serves here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What kind of fleet a block of runs has."""

    engines: int = 3
    ranks: int = 1
    staging: Staging = Staging.AUTO
    pause: PauseMode = PauseMode.KEEP

    def __str__(self) -> str:
        where = "staged" if self.staging is Staging.AUTO else "in place"
        return f"{self.engines}x{self.ranks} {where} {self.pause}"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the engines are; the default holds weights and nothing else."""

    arguments: tuple[str, ...] = ("held",)
    model: str = ""
    environment: Mapping[str, str] | None = None
    start_seconds: float = START_SECONDS
    rank_title: str = "chaos-rank-0"
    body: Mapping[str, Any] | None = None
    """What the load asks with."""
    answer_seconds: float = 1.0


def engine_python() -> str:
    """The interpreter that has torch: CHAOS_ENGINE_PYTHON, or that of the engines' tests."""
    return os.environ.get("CHAOS_ENGINE_PYTHON") or str(ROOT / "build/engines/bin/python")


class EnginePod:
    """One incarnation of an engine."""

    def __init__(self, fleet: "Fleet", engine: int, incarnation: int) -> None:
        self.engine = engine
        self.name = f"{FLEET}-{engine}-0-{incarnation}"
        self.plug = fleet.network.plug()
        kind, shape = fleet.kind, fleet.shape
        environment = {
            "ROLLOUTFLEET_FLEET": FLEET,
            "ROLLOUTFLEET_FLEET_UID": "fleet-uid",
            "ROLLOUTFLEET_POD_NAME": self.name,
            "ROLLOUTFLEET_POD_UID": f"uid-{self.name}",
            "ROLLOUTFLEET_POD_IP": self.plug.address,
            "ROLLOUTFLEET_ENGINE": str(engine),
            "ROLLOUTFLEET_RANKS": str(shape.ranks),
            "ROLLOUTFLEET_TOKEN_FILE": str(fleet.folder / "token"),
            "HOME": str(fleet.folder / "home"),
            "TMPDIR": str(fleet.folder / "tmp"),
            "CHAOS_DAWDLE": json.dumps(DAWDLE),
            **(kind.environment or {}),
        }
        self.party = Party(
            self.name,
            [
                *(engine_python(), "-m", "rolloutfleet_worker", "--", *kind.arguments),
                f"--tensor-parallel-size={shape.ranks}",
            ],
            self.plug,
            fleet.folder,
            environment=environment,
            standin=not kind.model,
            probe=f"http://{self.plug.address}:8001/healthz/live",
        )

    @property
    def url(self) -> str:
        return f"http://{self.plug.address}:8000"

    def report(self) -> WorkerReport | None:
        """What its launcher says, or None when it does not answer."""
        return report_of(self.plug.address, TOKEN)


class TrainerParty:
    """A trainer's process, with what it has said."""

    def __init__(self, number: int, address: str, token: str, kind: EngineKind, folder: Path, plug: Plug) -> None:
        self.party = Party(
            f"trainer-{number}",
            [
                *(engine_python(), "-m", "benchmarks.chaos.trainer", "--address", address, "--token", token),
                *(["--model", kind.model] if kind.model else []),
            ],
            plug,
            folder,
            environment={**_TORCHRUN, **(kind.environment or {})},
            talks=True,
        )
        self.events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.heard: list[dict[str, Any]] = []
        self.party.start()
        threading.Thread(target=self._listen, name=self.party.name, daemon=True).start()

    def tell(self, **order: Any) -> None:
        process = self.party.process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()

    def await_event(self, wanted: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """The next event that is wanted; TimeoutError when there is none in time, or the trainer has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                event = self.events.get(timeout=min(left, 0.1))
                self.heard.append(event)
                if wanted(event):
                    return event
                continue
            if not self.party.running:
                break
        raise TimeoutError(f"{self.party.name} said nothing of that kind within {seconds:g} s")

    def close(self) -> None:
        self.party.kill()
        self.party.plug.close()

    def _listen(self) -> None:
        process = self.party.process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self.events.put(json.loads(line))


class Fleet(Standing):
    """Started anew for a block of runs; the supervisor heals it between them as kubelet and operator would."""

    token = TOKEN
    lease_seconds = LEASE_SECONDS
    retry_seconds = RETRY_SECONDS

    def __init__(self, folder: Path, shape: Shape, kind: EngineKind | None = None) -> None:
        self.folder = folder
        self.shape = shape
        self.kind = kind or EngineKind()
        self.version = 0
        """The version that was last asked for."""
        (folder / "home").mkdir(parents=True)
        (folder / "tmp").mkdir()
        (folder / "token").write_text(TOKEN)
        self.network = Network()
        self.kubelet = Kubelet()
        self._plugs: list[Plug] = []
        self._incarnations = [0] * shape.engines
        self._trainers = 0
        self.api = self._start_api()
        self.engines = [self._start_engine(engine) for engine in range(shape.engines)]
        self.sync = self._start_sync()
        self.trainer = self._start_trainer()
        self.spare = self._start_trainer()
        self.load = self._start_load()

    @property
    def address(self) -> str:
        """Where trainers find the sync job."""
        return f"http://{self.sync.plug.address}:8080"

    @property
    def pods(self) -> list[EnginePod]:
        return self.engines

    def await_started(self) -> None:
        """Return when the sync job has admitted every engine, and the trainers are up."""
        await_that("every engine is admitted", self.all_whole, self.kind.start_seconds)
        for trainer in (self.trainer, self.spare):
            trainer.await_event(lambda event: event["event"] == "up", START_SECONDS)

    def replace_engine(self, engine: int) -> None:
        """What the operator does when a pod's node is lost: another pod in its place, and the roster says so."""
        gone = self.engines[engine]
        self.kubelet.forget(gone.party)
        gone.party.kill()
        gone.plug.close()
        self.engines[engine] = self._start_engine(engine)
        self.write_roster()
        self._write_targets()

    def next_trainer(self) -> None:
        """The spare takes the place of a trainer that was lost, whose network stays for the kernel's last words to its peers."""
        self.trainer.party.kill()
        self._plugs.append(self.trainer.party.plug)
        self.trainer, self.spare = self.spare, self._start_trainer()

    def write_roster(self) -> None:
        """Tell the API server who the members are; again, while it does not answer."""
        members = [
            {
                "engine": pod.engine,
                "podName": pod.name,
                "podUid": f"uid-{pod.name}",
                "address": pod.plug.address,
                "ranks": self.shape.ranks,
            }
            for pod in self.engines
        ]
        roster = {"fleet": FLEET, "fleetUid": "fleet-uid", "engines": len(members), "members": members}
        url = f"http://{self.api.plug.address}:{API_PORT}/roster"
        request = urllib.request.Request(url, data=json.dumps(roster).encode(), method="PUT")

        def written() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=2.0):
                    return True
            except OSError:
                return False

        await_that("the roster is written", written, START_SECONDS)

    def close(self) -> None:
        """End everything."""
        self.kubelet.close()
        for trainer in (self.trainer, self.spare):
            trainer.close()
        for pod in self.engines:
            pod.plug.close()
        for plug in self._plugs:
            plug.close()
        self.network.close()

    def _plug(self) -> Plug:
        self._plugs.append(self.network.plug())
        return self._plugs[-1]

    def _start_api(self) -> Party:
        plug = self._plug()
        command = [
            *(sys.executable, "-m", "benchmarks.chaos.api", "--folder", str(self.folder), "--host", plug.address),
            f"--write-seconds={API_WRITE_SECONDS}",
        ]
        party = Party("api", command, plug, self.folder)
        self.kubelet.run(party)
        return party

    def _start_sync(self) -> Party:
        self.write_roster()
        kubeconfig = self.folder / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(f"http://{self.api.plug.address}:{API_PORT}"))
        policy = RefitPolicy(
            transport=Transport.LAYOUT,
            staging=self.shape.staging,
            pause=self.shape.pause,
            deadlines=DEADLINES,
        )
        plug = self._plug()
        command = [
            *(sys.executable, "-m", "rolloutfleet_sync", "--fleet", FLEET, "--fleet-uid", "fleet-uid"),
            *("--namespace", NAMESPACE, "--weightsync", FLEET, "--model", "tiny"),
            *("--token-file", str(self.folder / "token"), f"--lease-seconds={LEASE_SECONDS}"),
            f"--policy={policy.model_dump_json(by_alias=True)}",
        ]
        probe = f"http://{plug.address}:8080/healthz/live"
        environment = {"KUBECONFIG": str(kubeconfig)}
        party = Party("sync", command, plug, self.folder, environment=environment, probe=probe)
        self.kubelet.run(party)
        return party

    def _start_engine(self, engine: int) -> EnginePod:
        pod = EnginePod(self, engine, self._incarnations[engine])
        self._incarnations[engine] += 1
        self.kubelet.run(pod.party)
        return pod

    def _start_trainer(self) -> TrainerParty:
        self._trainers += 1
        plug = self.network.plug(megabits=0 if self.kind.model else TRAINER_MEGABITS)
        return TrainerParty(self._trainers, self.address, TOKEN, self.kind, self.folder, plug)

    def _write_targets(self) -> None:
        fresh = self.folder / "targets.fresh"
        body = self.kind.body or {"prompt": "x"}
        known = {"urls": [pod.url for pod in self.engines], "body": body, "seconds": self.kind.answer_seconds}
        fresh.write_text(json.dumps(known))
        fresh.replace(self.folder / "targets.json")

    def _start_load(self) -> Party:
        self._write_targets()
        command = [
            *(sys.executable, "-m", "benchmarks.chaos.load", "--engines", str(self.shape.engines)),
            *("--targets", str(self.folder / "targets.json"), "--output", str(self.folder / "answers.jsonl")),
        ]
        party = Party("load", command, self._plug(), self.folder)
        self.kubelet.run(party)
        return party


def _kubeconfig(server: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "chaos", "cluster": {"server": server}}],
            "users": [{"name": "chaos", "user": {"token": "chaos"}}],
            "contexts": [{"name": "chaos", "context": {"cluster": "chaos", "user": "chaos"}}],
            "current-context": "chaos",
        }
    )
