"""How a fleet stands, by its own engines' word and by its sync job's; the same for processes here and for pods in a cluster."""

import contextlib
import json
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

from rolloutfleet.contract.worker import WorkerReport, WorkerState


class Pod(Protocol):
    """One engine's pod, of either make."""

    @property
    def engine(self) -> int: ...

    @property
    def name(self) -> str: ...

    def report(self) -> WorkerReport | None:
        """What its launcher says, or None when it does not answer."""


class Standing:
    """What every fleet can be asked."""

    token: str
    lease_seconds: float
    """How long a trainer that is gone keeps the fleet for itself."""
    retry_seconds: float
    """Between two calls of a trainer whose refit failed."""

    @property
    def address(self) -> str:
        """Where trainers find the sync job."""
        raise NotImplementedError

    @property
    def pods(self) -> Sequence[Pod]:
        """The engines, in order."""
        raise NotImplementedError

    def view(self) -> dict[str, Any]:
        """The fleet as its sync job sees it; empty when that does not answer."""
        with contextlib.suppress(OSError):
            found: dict[str, Any] = get(f"{self.address}/rolloutfleet/v1/fleet", 2.0, self.token)
            return found
        return {}

    def all_whole(self) -> bool:
        """Whether every engine of the roster serves the fleet's version, by its own word and by the sync job's."""
        view = self.view()
        pods = self.pods
        members = view.get("members", [])
        if {member["podName"] for member in members if member["ready"]} != {pod.name for pod in pods}:
            return False
        for pod in pods:
            report = pod.report()
            if report is None or report.state is not WorkerState.SERVING:
                return False
            if report.version != view["version"] or report.admitted != view["version"]:
                return False
        return True

    def all_up(self) -> bool:
        """Whether the next refit reaches every engine, which is all that can be had where no peer can lend a version."""
        return self.all_whole()

    def stands(self) -> str:
        """Where everybody stands, in a line each, for a failure's message."""
        lines = [f"sync: {json.dumps(self.view())[:1500]}"]
        for pod in self.pods:
            report = pod.report()
            told = "does not answer" if report is None else f"{report.state} {report.version} {report.message}"
            lines.append(f"{pod.name}: {told}")
        return "\n".join(lines)


def report_of(address: str, token: str) -> WorkerReport | None:
    """What the launcher at an address says, or None when it does not answer."""
    with contextlib.suppress(OSError):
        return WorkerReport.model_validate(get(f"http://{address}:8001/rolloutfleet/v1/worker", 2.0, token))
    return None


def get(url: str, seconds: float, token: str) -> Any:
    """The JSON at a URL, with the fleet's token; OSError when there is none."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.loads(response.read())
    except ValueError as error:
        raise OSError(f"{url} answered no JSON") from error
