"""A fleet without Kubernetes: launchers with real vLLM and the sync job, as processes of this machine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.engines.cpuengine import CPU_ENGINE

import rolloutfleet
from rolloutfleet.contract.policy import RefitPolicy, Transport
from rolloutfleet.contract.worker import WorkerReport, WorkerState

REPOSITORY = Path(__file__).parents[2]
TOKEN = "token-of-the-tests"
SERVED_NAME = "tiny"
START_SECONDS = 300.0
"""An engine starts in half a minute on two idle cores."""
SOON_SECONDS = 60.0

Found = TypeVar("Found")


def await_that(what: str, found: Callable[[], Found], seconds: float = SOON_SECONDS) -> Found:
    """The first true answer, asked for ten times a second: other processes and their HTTP answers offer no event."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return answer


def free_ports() -> tuple[int, int]:
    """Two neighbours: an engine generates on the port below its control port."""
    while True:
        with socket.socket() as lower, socket.socket() as upper:
            lower.bind(("127.0.0.1", 0))
            port = lower.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                upper.bind(("127.0.0.1", port + 1))
                return port, port + 1


class Launched:
    """A launcher and the vLLM below it: one pod."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        engine: int = 0,
        ranks: int = 1,
        grace_seconds: int = 0,
        pods: int = 1,
        leader: "Launched | None" = None,
        pod_rank: int = 0,
    ) -> None:
        self.name = f"host-{engine}-{pod_rank}-0"
        self.engine = engine
        self.ranks = ranks
        self.generation_port, self.control_port = free_ports()
        suffix = f"-{pod_rank}" if pod_rank else ""
        self.log = folder / f"engine-{engine}{suffix}.log"
        self.termination_log = folder / f"termination-{engine}{suffix}"
        self.termination_log.touch()
        several = {}
        if pods > 1:
            several = {
                "ROLLOUTFLEET_PODS": str(pods),
                "ROLLOUTFLEET_POD_RANK": str(pod_rank),
                "ROLLOUTFLEET_ENGINE_PORT": str(free_ports()[0]),
            }
        if leader is not None:
            several["ROLLOUTFLEET_LEADER"] = f"127.0.0.1:{leader.control_port}"
        (folder / "token").write_text(TOKEN)
        (folder / "home").mkdir(exist_ok=True)
        environment = {
            **CPU_ENGINE,
            "HOME": str(folder / "home"),
            "ROLLOUTFLEET_FLEET": "host",
            "ROLLOUTFLEET_FLEET_UID": "fleet-uid",
            "ROLLOUTFLEET_POD_NAME": self.name,
            "ROLLOUTFLEET_POD_UID": f"pod-{engine}{suffix}-uid",
            "ROLLOUTFLEET_POD_IP": "127.0.0.1",
            "ROLLOUTFLEET_ENGINE": str(engine),
            "ROLLOUTFLEET_RANKS": str(ranks),
            "ROLLOUTFLEET_TOKEN_FILE": str(folder / "token"),
            "ROLLOUTFLEET_GENERATION_PORT": str(self.generation_port),
            "ROLLOUTFLEET_CONTROL_PORT": str(self.control_port),
            "ROLLOUTFLEET_RUNTIME_DIRECTORY": str(folder / "run"),
            "ROLLOUTFLEET_TERMINATION_LOG": str(self.termination_log),
            "ROLLOUTFLEET_GRACE_SECONDS": str(grace_seconds),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
            **several,
        }
        command = [sys.executable, "-m", "rolloutfleet_worker", "--", *arguments]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
            )
        self._vllm: set[int] = set()
        self.answered_by = ""
        """The model that the last answer names."""

    @property
    def member(self) -> dict[str, Any]:
        """Its line of the roster."""
        return {
            "engine": self.engine,
            "podName": self.name,
            "podUid": f"pod-{self.engine}-uid",
            "address": f"127.0.0.1:{self.control_port}",
            "ranks": self.ranks,
        }

    def await_started(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            return self.probe("started") == ""

        await_that(f"{self.name} is up, see {self.log}", up, START_SECONDS)
        self.vllm_processes()

    def await_ready(self) -> None:
        await_that(f"{self.name} is Ready", lambda: self.probe("ready") == "")

    def await_state(self, state: WorkerState) -> None:
        await_that(f"{self.name} is {state}", lambda: self.report().state is state)

    def probe(self, kind: str) -> str | None:
        """A probe's reason for its no, empty for a yes, None when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.control_port}/healthz/{kind}", timeout=30) as response:
                return str(json.load(response)["reason"])
        except urllib.error.HTTPError as refusal:
            return str(json.load(refusal)["reason"])
        except OSError:
            return None

    def report(self) -> WorkerReport:
        url = f"http://127.0.0.1:{self.control_port}/rolloutfleet/v1/worker"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return WorkerReport.model_validate_json(response.read())

    def generate(self, prompt: str, tokens: int, model: str = SERVED_NAME) -> tuple[list[int], int]:
        """Greedy tokens and the weight version that the engine names; urllib's HTTPError when it refuses."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.generation_port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SOON_SECONDS) as response:
            version = int(response.headers["x-rolloutfleet-weight-version"])
            answer = json.load(response)
            self.answered_by = answer["model"]
            return answer["choices"][0]["token_ids"], version

    def vllm_processes(self) -> dict[int, str]:
        """Titles by process id of the processes below the launcher that are alive: those of the session it gave vLLM."""
        stats = {pid: stat for pid, stat in _processes() if stat.state != "Z"}
        self._vllm |= {pid for pid, stat in stats.items() if stat.parent == self.process.pid}
        return {pid: stat.title for pid, stat in stats.items() if stat.session in self._vllm}

    def stop(self) -> None:
        """End the launcher as a kubelet does; nothing of its vLLM may outlive it."""
        self.vllm_processes()
        self.process.terminate()
        self.process.wait(SOON_SECONDS)
        left = self.vllm_processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert left == {}, f"{self.name} left {left} behind"


class _Stat:
    """What /proc says of one process."""

    def __init__(self, pid: int, line: str) -> None:
        fields = line.rpartition(")")[2].split()
        self.title = line[line.find("(") + 1 : line.rfind(")")]
        self.state, self.parent, self.session = fields[0], int(fields[1]), int(fields[3])


def _processes() -> list[tuple[int, _Stat]]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append((int(path.name), _Stat(int(path.name), (path / "stat").read_text())))
    return found


class HostFleet:
    """Engines of one model and the sync job that refits them."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        engines: int = 1,
        ranks: int = 1,
        data: int = 1,
        stages: int = 1,
        pods: int = 1,
        unpacked: bool = False,
        lora_rank: int = 0,
    ) -> None:
        """
        Args:
            folder: for logs and status.
            model: what the engines load.
            engines: how many.
            ranks: of each engine.
            data: data parallel ranks among them, over which experts are spread.
            stages: pipeline stages among them.
            pods: launchers of each engine.
            unpacked: keeps CPU linears from packing their weights, as a GPU's do not.
            lora_rank: lets engines serve adapters.
        """
        self.folder = folder
        self.model = model
        arguments = [
            str(model),
            f"--served-model-name={SERVED_NAME}",
            f"--tensor-parallel-size={ranks // data // stages}",
            *([f"--pipeline-parallel-size={stages}"] if stages > 1 else []),
            *([f"--data-parallel-size={data}", "--enable-expert-parallel"] if data > 1 else []),
            "--dtype=float32",
            "--enforce-eager",
            "--max-model-len=256",
            "--num-gpu-blocks-override=64",
            *(["--enable-lora", f"--max-lora-rank={lora_rank}", "--max-loras=4"] if lora_rank else []),
            *(["--worker-extension-cls=tests.engines.unpacked.Unpacked"] if unpacked else []),
        ]
        self.engines = [Launched(folder, arguments, engine=index, ranks=ranks, pods=pods) for index in range(engines)]
        self.followers = [
            Launched(folder, arguments, engine=leader.engine, ranks=ranks, pods=pods, leader=leader, pod_rank=pod_rank)
            for leader in self.engines
            for pod_rank in range(1, pods)
        ]
        roster = {
            "fleet": "host",
            "fleetUid": "fleet-uid",
            "engines": engines,
            "members": [engine.member for engine in self.engines],
        }
        (folder / "roster.json").write_text(json.dumps(roster))
        self.sync: subprocess.Popen[bytes] | None = None
        self.version = 0

    def start(self) -> None:
        for engine in self.engines:
            engine.await_started()
        self.start_sync()
        for engine in self.engines:
            engine.await_ready()

    def start_sync(self, *, transport: Transport = Transport.GLOO, **policy: Any) -> None:
        """A sync job with this policy, in place of the one at work, which leaves its status behind."""
        self.stop_sync()
        port, _ = free_ports()
        self.address = f"http://127.0.0.1:{port}"
        command = [
            *(sys.executable, "-m", "rolloutfleet_sync", "--host=127.0.0.1", f"--port={port}"),
            *("--roster", str(self.folder / "roster.json"), "--status", str(self.folder / "status.json")),
            *("--token-file", str(self.folder / "token"), f"--model={SERVED_NAME}"),
            f"--policy={RefitPolicy(transport=transport, **policy).model_dump_json(by_alias=True)}",
        ]
        with (self.folder / "sync.log").open("a") as output:
            self.sync = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        await_that("the sync job answers", self._sync_answers)

    def stop_sync(self) -> None:
        if self.sync is not None:
            self.sync.send_signal(signal.SIGCONT)
            self.sync.terminate()
            self.sync.wait(SOON_SECONDS)
            self.sync = None

    def connect(self, **options: Any) -> rolloutfleet.Fleet:
        return rolloutfleet.connect(self.address, token=TOKEN, **options)

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def status(self) -> dict[str, Any]:
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for engine in (*self.engines, *self.followers):
                stack.callback(engine.stop)
            stack.callback(self.stop_sync)

    def _sync_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/healthz", timeout=30):
                return True
        except OSError:
            return False
