"""Engines, the sync job and other programs as processes of this machine, started as their pods would start them."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rolloutfleet
from benchmarks.record import ROOT, TINY, say
from rolloutfleet.contract.policy import RefitPolicy
from rolloutfleet.contract.worker import WorkerReport

TOKEN = "token-of-a-benchmark"
SERVED_NAME = "measured"
PROBE_PATH = "/benchmark/rpc"
PROBE_ARGUMENTS = ("--middleware=benchmarks.probe.Probe", "--worker-extension-cls=benchmarks.probe.ProbedWorker")
"""What an engine of a fleet is started with, so that :mod:`benchmarks.probe` can be asked through it."""
START_SECONDS = 400.0
STOP_SECONDS = 30.0
_PATHS = ("client", "operator", "worker_image", ".")
_CPU_ENGINE = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class StartError(Exception):
    """A process did not come up; holds the end of its log."""


def free_ports() -> tuple[int, int]:
    """Two neighbours: an engine generates on the port below its control port."""
    while True:
        with socket.socket() as lower, socket.socket() as upper:
            lower.bind(("127.0.0.1", 0))
            port = int(lower.getsockname()[1])
            try:
                upper.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port, port + 1


def get(url: str, seconds: float = 30.0) -> Any:
    """The JSON at a URL, with the fleet's token."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return json.loads(response.read() or b"null")


def post(url: str, body: Mapping[str, Any], seconds: float = 300.0) -> Any:
    """The JSON that a URL answers to a JSON body; OSError with the answer's text when it is no success."""
    headers = {"content-type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as refusal:
        raise OSError(f"{url} answered {refusal.code}: {refusal.read()[:2000].decode(errors='replace')}") from refusal


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30.0):
            return True
    except OSError:
        return False


class Program:
    """A process of ours with its log; :meth:`stop` ends it with all below it."""

    def __init__(self, log: Path, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        path = os.pathsep.join([*(str(ROOT / part) for part in _PATHS), os.environ.get("PYTHONPATH", "")])
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUTFLEET_")}
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**inherited, **(_CPU_ENGINE if TINY else {}), **(environment or {}), "PYTHONPATH": path},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_answer(self, url: str, seconds: float = START_SECONDS) -> None:
        """Return when the URL answers with success; StartError when the process ends or time is up."""
        deadline = time.monotonic() + seconds
        while not _answers(url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"{url} did not answer; {self.log} ends:\n{self.tail()}")
            time.sleep(0.2)

    def tail(self, characters: int = 5000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:]

    def stop(self) -> None:
        """Ask it to end, then make the whole session end."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                say(f"{self.log.name}: did not end by itself within {STOP_SECONDS:g} s")
        self.kill()

    def kill(self) -> None:
        """End every process of its session at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)


class Engine(Program):
    """One engine pod without its pod: the launcher, and stock vLLM below it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        arguments: Sequence[str],
        *,
        engine: int = 0,
        ranks: int = 1,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.ranks = ranks
        self.generation_port, self.control_port = free_ports()
        (folder / "token").write_text(TOKEN)
        served = [*PROBE_ARGUMENTS, f"--served-model-name={SERVED_NAME}", f"--tensor-parallel-size={ranks}", *arguments]
        environment = {
            "ROLLOUTFLEET_FLEET": "measured",
            "ROLLOUTFLEET_FLEET_UID": "fleet-uid",
            "ROLLOUTFLEET_POD_NAME": self.name,
            "ROLLOUTFLEET_POD_UID": f"pod-{engine}",
            "ROLLOUTFLEET_POD_IP": "127.0.0.1",
            "ROLLOUTFLEET_ENGINE": str(engine),
            "ROLLOUTFLEET_RANKS": str(ranks),
            "ROLLOUTFLEET_TOKEN_FILE": str(folder / "token"),
            "ROLLOUTFLEET_GENERATION_PORT": str(self.generation_port),
            "ROLLOUTFLEET_CONTROL_PORT": str(self.control_port),
            "ROLLOUTFLEET_RUNTIME_DIRECTORY": str(folder / f"run-{engine}"),
            "ROLLOUTFLEET_AWAIT_FIRST_REFIT": "true",
            **(more or {}),
        }
        super().__init__(
            folder / f"engine-{engine}.log", ["-m", "rolloutfleet_worker", "--", str(model), *served], environment
        )

    @property
    def name(self) -> str:
        return f"measured-{self.engine}-0-0"

    @property
    def url(self) -> str:
        """Where it generates."""
        return f"http://127.0.0.1:{self.generation_port}"

    @property
    def control(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def member(self) -> dict[str, Any]:
        """Its line of the roster."""
        address = f"127.0.0.1:{self.control_port}"
        return {
            "engine": self.engine,
            "podName": self.name,
            "podUid": f"pod-{self.engine}",
            "address": address,
            "ranks": self.ranks,
        }

    def await_started(self) -> None:
        """Return when vLLM is up."""
        self.await_answer(f"{self.control}/healthz/started")
        say(f"{self.name} is up")

    def report(self) -> WorkerReport:
        """What the launcher says of its engine."""
        return WorkerReport.model_validate(get(f"{self.control}/rolloutfleet/v1/worker"))

    def call(self, method: str, *arguments: Any, seconds: float = 300.0) -> Any:
        """What the worker of rank 0 answers through the probe; the engine must be serving."""
        body = {"method": method, "args": list(arguments), "timeout": seconds}
        return post(f"{self.url}{PROBE_PATH}", body, seconds)["results"][0]

    def core(self) -> int:
        """Process id of vLLM's engine core, which holds the weights."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            title, fields = line[line.find("(") + 1 : line.rfind(")")], line.rpartition(")")[2].split()
            # vLLM's own processes live in the session that the launcher opened for them.
            if title.startswith("VLLM::EngineCor") and self._below(int(fields[1])):
                return int(path.name)
        raise ProcessLookupError(f"{self.name} has no engine core")

    def kill(self) -> None:
        """End the launcher and, in its session of its own, vLLM."""
        for session in self._sessions():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        super().kill()

    def _sessions(self) -> set[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {int(pid) for pid in children.read_text().split()} if children.exists() else set()

    def _below(self, parent: int) -> bool:
        while parent > 1 and parent != self.process.pid:
            try:
                parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                return False
        return parent == self.process.pid


class Fleet:
    """Engines of one model and the sync job that refits them."""

    def __init__(self, folder: Path, engines: Sequence[Engine]) -> None:
        self.folder = folder
        self.engines = list(engines)
        self.version = 0
        self._sync: Program | None = None
        self.write_roster()

    def write_roster(self) -> None:
        """Tell the sync job who its members are: the engines in the list."""
        members = [engine.member for engine in self.engines]
        roster = {"fleet": "measured", "fleetUid": "fleet-uid", "engines": len(members), "members": members}
        fresh = self.folder / "roster.fresh"
        fresh.write_text(json.dumps(roster))
        fresh.replace(self.folder / "roster.json")

    def start(self, policy: RefitPolicy, **environment: str) -> None:
        """A sync job with this policy, once every engine is up, in place of the one at work."""
        for engine in self.engines:
            engine.await_started()
        self.stop_sync()
        port, _ = free_ports()
        self.address = f"http://127.0.0.1:{port}"
        self._sync = Program(
            self.folder / "sync.log",
            [
                *("-m", "rolloutfleet_sync", "--host=127.0.0.1", f"--port={port}", f"--model={SERVED_NAME}"),
                *("--roster", str(self.folder / "roster.json"), "--status", str(self.folder / "status.json")),
                *("--token-file", str(self.folder / "token"), f"--policy={policy.model_dump_json(by_alias=True)}"),
            ],
            environment,
        )
        self._sync.await_answer(f"{self.address}/healthz", 60.0)

    def connect(self, **options: Any) -> rolloutfleet.Fleet:
        """A trainer's connection to it."""
        return rolloutfleet.connect(self.address, token=TOKEN, timeout=60.0, **options)

    def status(self) -> dict[str, Any]:
        """What the sync job has written as its status."""
        path = self.folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def logs(self, characters: int = 4000) -> str:
        """The ends of all logs, for a failure's message."""
        programs = [*self.engines, *([self._sync] if self._sync else [])]
        return "\n".join(f"--- {program.log.name}\n{program.tail(characters)}" for program in programs)

    def stop_sync(self) -> None:
        if self._sync is not None:
            self._sync.stop()
            self._sync = None

    def stop(self) -> None:
        """End everything."""
        self.stop_sync()
        for engine in self.engines:
            engine.stop()


def await_that(what: str, found: Callable[[], bool], seconds: float) -> float:
    """Seconds until it was so, asked for a hundred times a second; TimeoutError when it never was."""
    began = time.monotonic()
    while not found():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)
    return time.monotonic() - began
