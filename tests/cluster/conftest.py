"""The product on real nodes: the demo's stage, one fleet of two vLLM engines for most tests, trainers in their own processes."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.stage import MODEL, Stage, condition

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@dataclass
class LiveFleet:
    """A fleet in the cluster, and what tests do with it."""

    stage: Stage
    name: str
    namespace: str = "default"

    def body(self) -> dict[str, Any]:
        return json.loads(self.stage.kubectl("get", "rolloutfleet", self.name, "-n", self.namespace, "-o", "json"))

    def weight_sync(self) -> dict[str, Any]:
        return json.loads(self.stage.kubectl("get", "weightsync", self.name, "-n", self.namespace, "-o", "json"))

    def condition(self, kind: str) -> dict[str, Any]:
        return dict(condition(self.body(), kind))

    def pods(self, role: str = "leader") -> list[dict[str, Any]]:
        selector = f"rolloutfleet.io/fleet={self.name},rolloutfleet.io/role={role}"
        found = json.loads(self.stage.kubectl("get", "pods", "-n", self.namespace, "-l", selector, "-o", "json"))[
            "items"
        ]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    @property
    def version(self) -> int:
        return int(self.weight_sync().get("status", {}).get("version", 0))

    def refit(self, *, check: bool = True, **options: Any) -> dict[str, Any]:
        """One refit by a trainer process; its JSON line. ``version`` defaults to the next one."""
        token = options.pop("token", None) or self.stage.token(self.name, self.namespace)
        options.setdefault("version", self.version + 1)
        command = [str(self.stage.python), str(HERE / "trainer_process.py"), f"--model={MODEL}"]
        command.append(f"--address={self.stage.sync_address(self.name, self.namespace)}")
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            command += (
                [flag]
                if value is True
                else [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]
            )
        environment = {
            **self.stage.environment,
            "PYTHONPATH": str(REPOSITORY / "client"),
            "ROLLOUTFLEET_TOKEN": token,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        answer = (
            json.loads(lines[-1])
            if lines
            else {"error": f"exit code {done.returncode}", "message": done.stderr[-2000:]}
        )
        assert not check or "result" in answer, answer
        return answer

    def generate(self, pod: dict[str, Any], prompt: str, tokens: int = 12) -> tuple[list[int], int]:
        """Greedy tokens of one engine, and the weight version that it names."""
        body = {
            "model": self.name_of_model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://{pod['status']['podIP']}:8000/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
            return answer["choices"][0]["token_ids"], int(response.headers["x-rolloutfleet-weight-version"])

    def metric(self, pod: dict[str, Any], name: str) -> float:
        with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    @property
    def name_of_model(self) -> str:
        model = self.body()["spec"]["model"]
        return str(model.get("servedName") or model["name"])

    def await_that(self, what: str, true: Callable[[], Any], seconds: float = 120) -> Any:
        """Poll the cluster, which offers no event for most of what users see."""
        deadline = time.monotonic() + seconds
        while True:
            if found := true():
                return found
            assert time.monotonic() < deadline, (
                f"{what}: not within {seconds:g} s; status {json.dumps(self.body().get('status'))}"
            )
            time.sleep(0.5)

    def await_ready(self) -> None:
        self.stage.await_ready(self.name, self.namespace)


@pytest.fixture(scope="session")
def stage() -> Stage:
    stage = Stage.here()
    stage.install()
    return stage


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """The quickstart fleet under another name, with fields of its spec replaced."""
    body = yaml.safe_load((REPOSITORY / "examples" / "quickstart.yaml").read_text())
    body["metadata"]["name"] = name
    for path, value in spec.items():
        target = body["spec"]
        *parents, leaf = path.split("__")
        for part in parents:
            target = target.setdefault(part, {})
        target[leaf] = value
    return body


@pytest.fixture(scope="session")
def fleet(stage: Stage) -> Iterator[LiveFleet]:
    """Two engines of stock vLLM, Ready."""
    stage.kubectl("apply", "-f", "-", stdin=json.dumps(manifest("shared")))
    shared = LiveFleet(stage, "shared")
    shared.await_ready()
    yield shared
    stage.kubectl("delete", "rolloutfleet", "shared", "--timeout=120s")


@pytest.fixture
def make_fleet(stage: Stage) -> Iterator[Callable[..., LiveFleet]]:
    made: list[str] = []

    def make(name: str, **spec: Any) -> LiveFleet:
        made.append(name)
        stage.kubectl("apply", "-f", "-", stdin=json.dumps(manifest(name, **spec)))
        return LiveFleet(stage, name)

    yield make
    for name in made:
        stage.kubectl("delete", "rolloutfleet", name, "--ignore-not-found", "--timeout=120s")
