"""Who gets requests: the Service's endpoints follow what each engine says of the weights that it holds."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any, Self

from tests.cluster.conftest import LiveFleet

PROMPT = "The fleet is"


class Watcher:
    """Looks at the Service's Ready endpoints again and again, and asks each of them what it holds."""

    def __init__(self, fleet: LiveFleet) -> None:
        self._fleet = fleet
        self._token = fleet.stage.token(fleet.name, fleet.namespace)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.looks = 0
        self.unfit: list[Any] = []
        """What Ready endpoints said that should not have been there."""
        self.seen: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            committed = self._fleet.version
            for address in ready_addresses(self._fleet):
                report = self._ask(address)
                if report is None:
                    continue
                self.seen.add(address)
                # One that takes the next version keeps requests waiting; a version that was committed since the look is newer.
                behind = report["state"] == "Serving" and report["version"] < committed
                if behind or report["state"] in ("Dirty", "Failed", "Starting"):
                    self.unfit.append(report)
            self.looks += 1

    def _ask(self, address: str) -> dict[str, Any] | None:
        """The engine's own report; None when it has gone since."""
        url = f"http://{address}:8001/rolloutfleet/v1/worker"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return dict(json.load(response))
        except (urllib.error.URLError, OSError):
            return None


def ready_addresses(fleet: LiveFleet) -> set[str]:
    selector = f"kubernetes.io/service-name={fleet.name}"
    slices = json.loads(fleet.stage.kubectl("get", "endpointslices", "-l", selector, "-o", "json"))["items"]
    return {
        address
        for each in slices
        for endpoint in each.get("endpoints") or ()
        if endpoint["conditions"]["ready"]
        for address in endpoint["addresses"]
    }


def late(fleet: LiveFleet) -> bool:
    pods = [pod for pod in fleet.pods() if "deletionTimestamp" not in pod["metadata"]]
    started = [pod for pod in pods if all(c.get("started") for c in pod["status"].get("containerStatuses") or [{}])]
    return len(started) == 2 and fleet.condition("Ready").get("reason") == "AwaitingNextRefit"


def test_no_endpoint_holds_an_engine_that_is_behind_while_one_is_drained_and_replaced(fleet: LiveFleet):
    fleet.refit(seed=91)
    fleet.await_ready()
    gone = fleet.pods()[0]
    with Watcher(fleet) as watcher:
        fleet.stage.kubectl("delete", "pod", gone["metadata"]["name"], "--wait=false")
        fleet.await_that(
            "it is no endpoint any more", lambda: gone["status"]["podIP"] not in ready_addresses(fleet), 30
        )
        # Engines on CPUs pack their weights and cannot lend them: the replacement waits for the next refit.
        fleet.await_that("its replacement is up and late", lambda: late(fleet), 240)
        before = watcher.looks
        fleet.await_that("it has been looked at", lambda: watcher.looks > before + 3, 60)
        after = fleet.refit(seed=92)["result"]
        fleet.await_that("the replacement is an endpoint", lambda: len(ready_addresses(fleet)) == 2, 60)
        fleet.await_ready()
    assert watcher.looks > 10
    assert len(watcher.seen) >= 2
    assert not watcher.unfit
    assert {fleet.generate(pod, PROMPT)[1] for pod in fleet.pods()} == {after["version"]}
    assert "recovery" not in fleet.body()["status"]
