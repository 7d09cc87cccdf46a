"""A fleet in the local cluster: real API server, kubelets, operator, sync job and vLLM; faults reach its processes from the host."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.chaos.fleet import EngineKind, TrainerParty
from benchmarks.chaos.network import Plug
from benchmarks.chaos.parties import Party, await_that
from benchmarks.chaos.standing import Standing, report_of
from benchmarks.chaos.tiny import PROMPT, TOKENS
from benchmarks.record import ROOT
from demo.stage import NAMESPACE, RELEASE_NAMESPACE, Stage, StageError
from localcluster import processes
from rolloutfleet.contract.worker import WorkerReport, WorkerState

NAME: Final = "chaos"
CLUSTER_MODEL: Final = Path("/var/lib/rolloutfleet/models/chaos")
"""A folder that every node of the local cluster has."""
ENGINES: Final = 2
START_SECONDS: Final = 400.0
WATCH_LAG_SECONDS: Final = 1.0
"""A version may be told by this watch so much later than it was written."""
_RANK = re.compile(rb"VLLM::(EngineCore|Worker)")
_API_SERVER: Final = "kube-apiserver"


class HostPlug(Plug):
    """The place of a process that stands on the host, beside the cluster; nobody cuts it off."""

    def __init__(self) -> None:
        self.is_cut = False

    def command_prefix(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing was made."""


class PodParty:
    """The processes of the one pod of a kind, found by the pod's control group; a pod in its place is found anew."""

    def __init__(self, cluster: "ClusterFleet", word: str, *, namespace: str, selector: str) -> None:
        self._cluster, self._word = cluster, word
        self._where = ("-n", namespace, "-l", selector)
        self._uids: list[str] = []

    @property
    def restarts(self) -> int:
        """Of its containers, over all pods that stood in its place; only that it rises is of interest."""
        pods = self._pods()
        born = max((pod["metadata"]["creationTimestamp"] for pod in pods), default="")
        started = sum(
            each.get("restartCount", 0) for pod in pods for each in pod["status"].get("containerStatuses", [])
        )
        return int(re.sub(r"\D", "", str(born)) or 0) * 1000 + int(started)

    def is_ready(self) -> bool:
        """Whether it is up: before, the first process of a container hears no SIGTERM."""
        statuses = [each for pod in self._pods() for each in pod["status"].get("containerStatuses", [])]
        return bool(statuses) and all(each["ready"] for each in statuses)

    def signal(self, number: signal.Signals, title: str = "") -> None:
        """To its main process, or with a title to the rank below it, as the pods stood when their restarts were last counted."""
        os.kill(self._find(title), number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    def _find(self, title: str) -> int:
        found = self._search(title)
        if found is None:
            self._pods()
            found = self._search(title)
        if found is None:
            raise ProcessLookupError(f"no process {title or self._word} in pods {self._where}")
        return found

    def _search(self, title: str) -> int | None:
        """The process with the lowest number, in the pods that are known."""
        for pid in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                groups = Path(f"/proc/{pid}/cgroup").read_text().replace("_", "-")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                ours = _RANK.search(command) if title else self._word.encode() in command
                if ours and any(uid in groups for uid in self._uids):
                    return pid
        return None

    def _pods(self) -> list[dict[str, Any]]:
        found = self._cluster.get_items("pods", *self._where)
        # Kept, so that a fault needs no answer of the API server before it can strike.
        self._uids = [pod["metadata"]["uid"] for pod in found]
        return found


@dataclass(frozen=True, slots=True)
class ClusterPod:
    """One engine's pod as it is now."""

    engine: int
    name: str
    address: str
    token: str
    party: PodParty

    def report(self) -> WorkerReport | None:
        return report_of(self.address, self.token)


class ApiServer:
    """The cluster's API server, a process of the host."""

    def __init__(self, stage: Stage) -> None:
        self._run = stage.paths.run

    def signal(self, number: signal.Signals, title: str = "") -> None:
        del title
        record = processes.read_record(self._run, _API_SERVER)
        if record is None:
            raise ProcessLookupError(f"{_API_SERVER} does not run")
        os.kill(record.identity.pid, number)


class ClusterFleet(Standing):
    """Made anew for a block of runs; kubelet and operator heal it between them."""

    lease_seconds = 30.0
    retry_seconds = 1.0

    def __init__(self, stage: Stage, folder: Path, kind: EngineKind, policy: Mapping[str, Any]) -> None:
        self.stage, self.folder, self.kind = stage, folder, kind
        self.shape = f"{ENGINES} engines in the local cluster, {json.dumps(policy)}"
        self.version = 0
        folder.mkdir(parents=True)
        (folder / "published.jsonl").touch()
        stage.kubectl("delete", "rolloutfleet", NAME, "-n", NAMESPACE, "--ignore-not-found", "--timeout=180s")
        stage.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(_manifest(kind, policy)))
        self._closing = threading.Event()
        stage.await_ready(NAME, NAMESPACE)
        self.token = stage.token(NAME, NAMESPACE)
        self._address = stage.sync_address(NAME, NAMESPACE)
        self._parties = [self._engine_party(engine) for engine in range(ENGINES)]
        self.sync = PodParty(
            self,
            "rolloutfleet_sync",
            namespace=NAMESPACE,
            selector=f"rolloutfleet.io/fleet={NAME},rolloutfleet.io/role=sync",
        )
        self.operator = PodParty(
            self,
            "rolloutfleet_operator",
            namespace=RELEASE_NAMESPACE,
            selector="app.kubernetes.io/name=rolloutfleet",
        )
        self.api = ApiServer(stage)
        self._watching: subprocess.Popen[str] | None = None
        threading.Thread(target=self._watch_versions, name="versions", daemon=True).start()
        self._trainers = 0
        self.trainer, self.spare = self._start_trainer(), self._start_trainer()
        self._write_targets()
        command = [*(str(ROOT / ".venv/bin/python"), "-m", "benchmarks.chaos.load", f"--engines={ENGINES}")]
        command += ["--targets", str(folder / "targets.json"), "--output", str(folder / "answers.jsonl")]
        self._load = Party("load", command, HostPlug(), folder)
        self._load.start()

    @property
    def address(self) -> str:
        return self._address

    @property
    def pods(self) -> list[ClusterPod]:
        found = self.get_items(
            "pods", "-n", NAMESPACE, "-l", f"rolloutfleet.io/fleet={NAME},rolloutfleet.io/role=leader"
        )
        pods = []
        for pod in found:
            if "deletionTimestamp" in pod["metadata"]:
                continue
            engine = int(pod["metadata"]["labels"]["rolloutfleet.io/engine"])
            address = pod["status"].get("podIP", "")
            pods.append(ClusterPod(engine, pod["metadata"]["name"], address, self.token, self._parties[engine]))
        return sorted(pods, key=lambda pod: pod.engine)

    @property
    def engines(self) -> list[ClusterPod]:
        return self.pods

    def get_items(self, *what: str) -> list[dict[str, Any]]:
        """What ``kubectl get`` lists."""
        found: list[dict[str, Any]] = json.loads(self.stage.kubectl("get", *what, "-o", "json"))["items"]
        return found

    def await_started(self) -> None:
        await_that("every engine is admitted", self.all_whole, START_SECONDS)
        for trainer in (self.trainer, self.spare):
            trainer.await_event(lambda event: event["event"] == "up", START_SECONDS)

    def all_whole(self) -> bool:
        """As every fleet, and by the word that Kubernetes has from the operator."""
        self._write_targets()
        if not super().all_whole():
            return False
        body = json.loads(self.stage.kubectl("get", "rolloutfleet", NAME, "-n", NAMESPACE, "-o", "json"))
        told = {each["type"]: each["status"] for each in body["status"].get("conditions", [])}
        return told.get("Ready") == "True" and told.get("WeightsCurrent") == "True"

    def all_up(self) -> bool:
        """Kernels for CPUs compute from packed copies, which no peer can lend: an engine that starts anew waits for the next refit."""
        self._write_targets()
        pods = self.pods
        reports = [pod.report() for pod in pods]
        up = all(report is not None and report.state is WorkerState.SERVING for report in reports)
        members = self.view().get("members", [])
        known = {member["podName"] for member in members if member["state"] == WorkerState.SERVING}
        served = up and len(pods) == ENGINES and known == {pod.name for pod in pods}
        return served and self.sync.is_ready() and self.operator.is_ready()

    def next_trainer(self) -> None:
        """The spare takes the place of a trainer that was lost."""
        self.trainer.close()
        self.trainer, self.spare = self.spare, self._start_trainer()

    def replace_engine(self, engine: int) -> None:
        """Have the operator make another pod."""
        self.stage.kubectl("delete", "pod", "-n", NAMESPACE, self.pods[engine].name, "--grace-period=0", "--force")

    def close(self) -> None:
        self._closing.set()
        if self._watching is not None:
            self._watching.kill()
        for trainer in (self.trainer, self.spare):
            trainer.close()
        self._load.kill()
        self._keep_logs()
        self.stage.kubectl("delete", "rolloutfleet", NAME, "-n", NAMESPACE, "--timeout=180s")

    def _keep_logs(self) -> None:
        """What every pod of the fleet has said, and its container of before, and the events, for whoever asks why a run ended badly."""
        events = self.stage.kubectl("get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp")
        (self.folder / "events.txt").write_text(events)
        for pod in self.get_items("pods", "-n", NAMESPACE, "-l", f"rolloutfleet.io/fleet={NAME}"):
            name = pod["metadata"]["name"]
            for which in ((), ("--previous",)):
                # There may be no container of before, and the pod may end meanwhile.
                with contextlib.suppress(StageError):
                    said = self.stage.kubectl("logs", name, "-n", NAMESPACE, "--all-containers", *which)
                    (self.folder / f"{name}{''.join(which)}.log").write_text(said)

    def _engine_party(self, engine: int) -> PodParty:
        selector = f"rolloutfleet.io/fleet={NAME},rolloutfleet.io/role=leader,rolloutfleet.io/engine={engine}"
        return PodParty(self, "rolloutfleet_worker", namespace=NAMESPACE, selector=selector)

    def _start_trainer(self) -> TrainerParty:
        self._trainers += 1
        return TrainerParty(self._trainers, self.address, self.token, self.kind, self.folder, HostPlug())

    def _write_targets(self) -> None:
        fresh = self.folder / "targets.fresh"
        urls = [f"http://{pod.address or 'localhost'}:8000" for pod in self.pods]
        if len(urls) != ENGINES:
            return  # the operator is about to make the one that is missing
        fresh.write_text(json.dumps({"urls": urls, "body": self.kind.body, "seconds": self.kind.answer_seconds}))
        fresh.replace(self.folder / "targets.json")

    def _watch_versions(self) -> None:
        """Notes every version that the record in the cluster comes to hold; the watch is begun anew while nobody closes it."""
        known = 0
        while not self._closing.is_set():
            self._watching = self.stage.start_kubectl(
                *("get", "weightsync", NAME, "-n", NAMESPACE, "--watch", "-o", 'jsonpath={.status.version}{"\\n"}')
            )
            assert self._watching.stdout is not None
            for line in self._watching.stdout:
                version = int(line.strip() or 0)
                if version > known:
                    known, moment = version, time.monotonic() - WATCH_LAG_SECONDS
                    with (self.folder / "published.jsonl").open("a") as notes:
                        notes.write(json.dumps({"version": version, "seconds": moment}) + "\n")
            self._watching.wait()


def cluster_kind(model: Path) -> EngineKind:
    """Engines of stock vLLM on the model in a folder that every node has."""
    body = {
        "model": "tiny",
        "prompt": list(PROMPT),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return EngineKind(
        model=str(model),
        environment={"TINY": "1"},
        start_seconds=START_SECONDS,
        rank_title="rank",
        body=body,
        answer_seconds=10.0,
    )


def _manifest(kind: EngineKind, policy: Mapping[str, Any]) -> dict[str, Any]:
    """The quickstart's fleet with the small model, and a budget of failures that this is not about."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    body["metadata"]["name"] = NAME
    spec = body["spec"]
    spec["replicas"] = ENGINES
    spec["model"] |= {"name": "tiny", "servedName": "tiny", "source": {"hostPath": {"path": kind.model}}}
    spec["engine"]["args"] |= {"num-gpu-blocks-override": "64"}
    spec["refit"] = dict(policy)
    spec["recovery"] = {"restartBudget": 20}
    return body
