"""The demo's steps; the cluster tests stand on the same stage."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localcluster.cpu_env import ensure_environment
from localcluster.gobuild import find_program
from localcluster.paths import Paths, find_paths
from localcluster.state import builder

FLEET = "quickstart"
NAMESPACE = "default"
RELEASE = "rolloutfleet"
RELEASE_NAMESPACE = "rolloutfleet-system"
MODEL = Path("/var/lib/rolloutfleet/models/tiny-qwen2")
OPERATOR_IMAGE = "localhost/rolloutfleet-operator:dev"
WORKER_IMAGE = "localhost/rolloutfleet-worker:dev"
READY_SECONDS = 600


class StageError(Exception):
    """A step failed; the text says which and shows why."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The local cluster with the product installed in it."""

    paths: Paths
    environment: Mapping[str, str]

    @classmethod
    def here(cls) -> "Stage":
        paths, environment = find_paths(os.environ), dict(os.environ)
        if environment.get("KUBECONFIG") == str(paths.kubeconfig):
            del environment["KUBECONFIG"]
        return cls(paths, environment)

    def set_up(self) -> None:
        """Everything up to a Ready fleet.

        Raises:
            StageError: a step failed.
        """
        self.install()
        with step(f"fleet {NAMESPACE}/{FLEET}: two engines of stock vLLM"):
            self.kubectl("apply", "-f", str(self.paths.repository / "examples" / "quickstart.yaml"))
            self.await_ready(FLEET, NAMESPACE)

    def install(self) -> None:
        """Cluster, images, model and chart; what is there already is left alone."""
        if self.environment.get("KUBECONFIG"):
            raise StageError(
                "KUBECONFIG is set: the demo builds images for its own local cluster; unset it and run again"
            )
        with step("local Kubernetes"):
            self.launcher("up")
        with step("CPU build of vLLM"):
            python = self.python
        with step("images"):
            contents = dict(line.split() for line in self.launcher("images").splitlines())
        with step(f"tiny random model in {MODEL}"):
            self._run([str(python), "-m", "demo.make_model", str(MODEL)], PYTHONPATH=str(self.paths.dev))
        with step("helm install"):
            self.helm(
                "upgrade",
                "--install",
                RELEASE,
                str(self.paths.repository / "charts" / "rolloutfleet"),
                f"--namespace={RELEASE_NAMESPACE}",
                "--create-namespace",
                f"--set=operator.image={OPERATOR_IMAGE},worker.image={WORKER_IMAGE}",
                # The tag stays, so the content tells the Deployment that the image is another one.
                f"--set-string=operator.podAnnotations.image-content={contents[OPERATOR_IMAGE]}",
                "--wait",
                "--timeout=5m",
            )

    def take_down(self) -> None:
        """Fleet, release and cluster."""
        self.launcher("down", "--purge")

    def train(self, refits: int) -> tuple[list[dict[str, Any]], bool]:
        """What the trainer printed, and whether all outputs were equal."""
        with step(f"a trainer refits {refits} times"):
            code, output = self.run_trainer(FLEET, NAMESPACE, refits)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if code not in {0, 1} or len(lines) != refits:
            raise StageError(
                f"the trainer ended with exit code {code} after {len(lines)} of {refits} refits; its messages stand above"
            )
        return lines, code == 0

    def run_trainer(self, fleet: str, namespace: str, refits: int) -> tuple[int, str]:
        engines = json.loads(self.kubectl("get", "rolloutfleet", fleet, "-n", namespace, "-o", "json"))["spec"][
            "replicas"
        ]
        command = [
            str(self.python),
            "-m",
            "demo.trainer",
            f"--address={self.sync_address(fleet, namespace)}",
            f"--model={MODEL}",
            f"--refits={refits}",
            f"--engines={engines}",
        ]
        environment = {
            **self.environment,
            "PYTHONPATH": f"{self.paths.repository / 'client'}:{self.paths.dev}",
            "ROLLOUTFLEET_TOKEN": self.token(fleet, namespace),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
            check=False,
        )
        return done.returncode, done.stdout

    def await_ready(self, fleet: str, namespace: str, seconds: float = READY_SECONDS) -> None:
        """Wait until the fleet is Ready, saying what it waits for."""
        deadline = time.monotonic() + seconds
        said = ""
        while time.monotonic() < deadline:
            body = json.loads(self.kubectl("get", "rolloutfleet", fleet, "-n", namespace, "-o", "json"))
            ready = condition(body, "Ready")
            current = body.get("status", {}).get("observedGeneration") == body["metadata"]["generation"]
            if current and ready.get("status") == "True":
                return
            words = f"{ready.get('reason', 'no status yet')}: {ready.get('message', '')}"
            self._require_operator()
            if words != said:
                said = words
                print(f"  {words}", file=sys.stderr, flush=True)
            time.sleep(1)
        raise StageError(f"fleet {namespace}/{fleet} was not Ready within {seconds:g} s; it last said {said}")

    def _require_operator(self) -> None:
        """Raise StageError with the operator's last words when it does not stay up."""
        selector = "app.kubernetes.io/name=rolloutfleet"
        pods = json.loads(self.kubectl("get", "pods", "-n", RELEASE_NAMESPACE, "-l", selector, "-o", "json"))["items"]
        for pod in pods:
            for container in pod.get("status", {}).get("containerStatuses", []):
                if container.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff":
                    name = pod["metadata"]["name"]
                    words = self.kubectl("logs", "-n", RELEASE_NAMESPACE, name, "--previous", "--tail=20")
                    raise StageError(f"the operator's pod {name} does not stay up; its last words:\n{words}")

    def sync_address(self, fleet: str, namespace: str) -> str:
        service = json.loads(self.kubectl("get", "service", f"{fleet}-sync", "-n", namespace, "-o", "json"))
        return f"http://{service['spec']['clusterIP']}:8080"

    def token(self, fleet: str, namespace: str) -> str:
        secret = json.loads(self.kubectl("get", "secret", f"{fleet}-token", "-n", namespace, "-o", "json"))
        return base64.b64decode(secret["data"]["token"]).decode()

    @property
    def python(self) -> Path:
        """The interpreter of the CPU build of vLLM."""
        with builder(self.paths):
            return ensure_environment(self.paths) / "bin" / "python"

    def launcher(self, *arguments: str) -> str:
        """Standard output of a launcher command; its messages go where ours go."""
        command = [sys.executable, "-m", "localcluster", *arguments]
        done = subprocess.run(
            command,
            env={**self.environment, "PYTHONPATH": str(self.paths.dev)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StageError(
                f"`{' '.join(command[1:])}` ended with exit code {done.returncode}; its messages stand above"
            )
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run(
            [find_program(self.paths, "kubectl", self.environment), *arguments],
            stdin=stdin,
            KUBECONFIG=str(self.paths.kubeconfig),
        )

    def start_kubectl(self, *arguments: str) -> subprocess.Popen[str]:
        """A kubectl that goes on until it is killed, such as a watch; what it says comes line by line."""
        return subprocess.Popen(
            [find_program(self.paths, "kubectl", self.environment), *arguments],
            env={**self.environment, "KUBECONFIG": str(self.paths.kubeconfig)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def helm(self, *arguments: str) -> str:
        return self._run(
            [find_program(self.paths, "helm", self.environment), *arguments], KUBECONFIG=str(self.paths.kubeconfig)
        )

    def _run(self, command: Sequence[str], *, stdin: str | None = None, **extra: str) -> str:
        done = subprocess.run(
            list(command),
            env={**self.environment, **extra},
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode != 0:
            raise StageError(
                f"`{' '.join(command)}` ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}"
            )
        return done.stdout


def condition(body: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of that type, or an empty mapping."""
    for found in body.get("status", {}).get("conditions", []):
        if found["type"] == kind:
            return dict(found)
    return {}


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says what begins and how long it took."""
    print(f"== {what}", file=sys.stderr, flush=True)
    began = time.monotonic()
    yield
    print(f"   {what}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
