"""The operator as it is deployed: a process of its own, told everything by its environment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from apiserver.harness.api import SECONDS
from apiserver.harness.simulation import IMAGE

ROOT = Path(__file__).resolve().parents[3]
CRD_FOLDER = ROOT / "crds"
OPERATOR_IMAGE = "registry.example/operator:1"
LEASE = "rolloutfleet-operator"
EXIT_LEASE_LOST = 75
_CRD_IS_TAKEN_UP = "storage is (re)initializing"


class OperatorProcess:
    """One ``python -m rolloutfleet_operator`` and the lines that it has logged so far."""

    def __init__(self, kubeconfig: str, environment: Mapping[str, str]) -> None:
        self.records: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._grown = threading.Condition()
        self._ended = False
        base = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'client'}"}
        # Port 0: any free one, since several operators run on this machine.
        fixed = {"KUBECONFIG": kubeconfig, "ROLLOUTFLEET_LIVENESS_PORT": "0", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rolloutfleet_operator"],
            env={**base, **environment, **fixed},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                with self._grown:
                    try:
                        self.records.append(json.loads(line))
                    except ValueError:
                        self.noise.append(line.rstrip())
                    self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    def await_record(
        self, what: str, true: Callable[[dict[str, Any]], Any], seconds: float = SECONDS
    ) -> dict[str, Any]:
        """The first log record for which ``true`` holds, logged already or to come."""
        seen = 0

        def found() -> dict[str, Any] | None:
            nonlocal seen
            fresh, seen = self.records[seen:], len(self.records)
            return next((record for record in fresh if true(record)), None)

        match: dict[str, Any] | None = None
        deadline = time.monotonic() + seconds
        with self._grown:
            while (match := found()) is None:
                left = deadline - time.monotonic()
                over = left <= 0 or self._ended
                assert not over, f"{what}: not within {seconds:g} s; {self.tail()}"
                self._grown.wait(left)
        return match

    def await_message(self, text: str, seconds: float = SECONDS) -> dict[str, Any]:
        return self.await_record(f"log says {text!r}", lambda record: text in str(record.get("message")), seconds)

    def await_lease(self, seconds: float = SECONDS) -> None:
        self.await_message("holding the Lease", seconds)

    def await_end(self, seconds: float = SECONDS) -> int:
        """The exit status, once the process has ended and its log is read to the end."""
        status = self._process.wait(seconds)
        self._reader.join(seconds)
        return status

    def kill(self) -> None:
        """SIGKILL: nothing is drained, the Lease is not given back."""
        self._process.kill()
        self.await_end()

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        return self.await_end()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def troubles(self) -> list[dict[str, Any]]:
        """What was logged above information, and whatever was not a log record.

        Not the requests that kopf repeats because the API server still takes up a CRD: it answers 429 for that long.
        """
        levels = {"WARNING", "ERROR", "CRITICAL"}
        logged = [r for r in self.records if str(r.get("level", "")).upper() in levels]
        return [r for r in logged if _CRD_IS_TAKEN_UP not in str(r.get("message", ""))] + [
            {"line": n} for n in self.noise
        ]

    def tail(self) -> str:
        lines = [json.dumps(record) for record in self.records[-25:]] + self.noise[-25:]
        return "the operator's log ends:\n" + "\n".join(lines)


def operator_environment(*namespaces: str, lease_namespace: str, **more: str) -> dict[str, str]:
    """What the chart's Deployment would tell an operator that serves these namespaces."""
    return {
        "ROLLOUTFLEET_LEASE_NAME": LEASE,
        "ROLLOUTFLEET_LEASE_NAMESPACE": lease_namespace,
        "ROLLOUTFLEET_NAMESPACES": ",".join(namespaces),
        "ROLLOUTFLEET_OPERATOR_IMAGE": OPERATOR_IMAGE,
        "ROLLOUTFLEET_WORKER_IMAGE": IMAGE,
        **more,
    }
