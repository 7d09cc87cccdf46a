"""The operator's own metrics; docs/metrics.md lists them, and a test compares the two."""

from collections import Counter as Tally
from collections.abc import Hashable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

# Otherwise each counter has a second series, of when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

PASS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STATUSES = ("True", "False", "Unknown")


class Metrics:
    """Counts passes, and remembers what each fleet's condition Ready said last."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passes = Counter(
            "rolloutfleet_operator_passes", "Passes over a fleet.", ("result",), registry=self.registry
        )
        self._seconds = Histogram(
            "rolloutfleet_operator_pass_seconds", "Seconds of a pass.", registry=self.registry, buckets=PASS_BUCKETS
        )
        self._errors = Counter(
            "rolloutfleet_operator_errors", "Passes that ended with an error.", ("reason",), registry=self.registry
        )
        self._writes = Counter("rolloutfleet_operator_status_writes", "Statuses written.", registry=self.registry)
        self._fleets: dict[Hashable, str] = {}
        self.registry.register(_Fleets(self._fleets))
        for result in ("done", "error"):
            self._passes.labels(result)

    def note_pass(self, seconds: float, error: str, *, wrote: bool) -> None:
        """A pass has ended; ``error`` is the reason of what it raised, empty for none."""
        self._passes.labels("error" if error else "done").inc()
        self._seconds.observe(seconds)
        if error:
            self._errors.labels(error).inc()
        if wrote:
            self._writes.inc()

    def note_fleet(self, key: Hashable, ready: str) -> None:
        """What the fleet's condition Ready says now."""
        self._fleets[key] = ready if ready in STATUSES else "Unknown"

    def forget_fleet(self, key: Hashable) -> None:
        """The fleet is gone, or nobody looks after it any more."""
        self._fleets.pop(key, None)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Every metric as text, OpenMetrics where that is accepted, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Fleets(Collector):
    def __init__(self, fleets: dict[Hashable, str]) -> None:
        self._fleets = fleets

    def collect(self) -> Iterable[GaugeMetricFamily]:
        counts = Tally(self._fleets.values())
        family = GaugeMetricFamily(
            "rolloutfleet_operator_fleets", "Fleets by their condition Ready.", labels=("ready",)
        )
        for status in STATUSES:
            family.add_metric((status,), counts[status])
        yield family

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()
