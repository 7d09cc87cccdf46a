"""The sync job's metrics, in Prometheus' own terms; docs/metrics.md lists them, and a test compares the two."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rolloutfleet.contract.history import Standing
from rolloutfleet.contract.trainer import Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet_sync.protocol.model import Refit, State
from rolloutfleet_sync.protocol.standing import count_states
from rolloutfleet_sync.protocol.summary import slowest_lag

# Otherwise each counter has a second series, of when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

TOTAL: Final = "Total"
"""Label of a whole refit, beside those of its phases."""
PHASE_BUCKETS: Final = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
PAUSE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ENGINE_STATES: Final = (
    *sorted(state.value for state in WorkerState),
    *sorted(standing.value for standing in Standing),
)


class Metrics:
    """Counts what changes from state to state; gauges are read from the newest state when somebody asks."""

    def __init__(self, fleet: str, look: Callable[[], State], now: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._fleet = fleet

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rolloutfleet_{name}", text, ("fleet", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"rolloutfleet_{name}",
                text,
                ("fleet", *labels),
                registry=self.registry,
                buckets=(*buckets, float("inf")),
            )

        self._refits = counter("refits", "Refits that have ended.", "outcome")
        self._seconds = histogram(
            "refit_seconds", "Seconds of each phase of refits that completed.", PHASE_BUCKETS, "phase"
        )
        self._pause = histogram(
            "pause_seconds", "Seconds that engines stood still in refits that completed.", PAUSE_BUCKETS
        )
        self._lag = histogram(
            "straggler_seconds", "Seconds from the middle engine to the last one that had a version.", PAUSE_BUCKETS
        )
        self._bytes = counter("refit_bytes", "Bytes of the versions that were published, each counted once.")
        self._aborts = counter("aborts", "Attempts that were aborted, by where they stood and why.", "phase", "code")
        self._lost = counter("lost_members", "Engines that were lost from a refit, by where it stood.", "phase")
        for outcome in (Phase.COMPLETE, Phase.FAILED):
            self._refits.labels(fleet, outcome.value)
        self._bytes.labels(fleet)
        self.registry.register(_Gauges(fleet, look, now))

    def render(self, accept: str) -> tuple[bytes, str]:
        """Every metric as text, OpenMetrics where that is accepted, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def count_change(self, before: State, after: State) -> None:
        """Count what has happened between two states that follow each other."""
        if after.refit is not before.refit and after.refit is not None:
            self._count_losses(before.refit, after.refit)
        for refit in ended_since(before, after):
            self._count_ended(refit)

    def _count_losses(self, before: Refit | None, refit: Refit) -> None:
        known = before if before is not None and before.id == refit.id else None
        begins = refit.phase is Phase.ABORTING and (known is None or known.phase is not Phase.ABORTING)
        if begins and refit.problem is not None:
            self._aborts.labels(self._fleet, refit.problem.phase, refit.problem.code.value).inc()
        for losses, old in (
            (refit.lost, known.lost if known else {}),
            (refit.casualties, known.casualties if known else {}),
        ):
            if losses is not old:
                for uid, problem in losses.items():
                    if uid not in old:
                        self._lost.labels(self._fleet, problem.phase).inc()

    def _count_ended(self, refit: Refit) -> None:
        self._refits.labels(self._fleet, refit.phase.value).inc()
        if refit.committed:
            self._bytes.labels(self._fleet).inc(refit.nbytes)
        if refit.phase is not Phase.COMPLETE:
            return
        for phase, seconds in refit.seconds.items():
            self._seconds.labels(self._fleet, phase).observe(seconds)
        self._seconds.labels(self._fleet, TOTAL).observe(sum(refit.seconds.values()))
        self._pause.labels(self._fleet).observe(refit.pause_seconds)
        if len(refit.arrived) > 1:
            self._lag.labels(self._fleet).observe(slowest_lag(refit))


def ended_since(before: State, after: State) -> Iterator[Refit]:
    """The refits that ended between two states that follow each other."""
    if after.finished is before.finished:
        return
    known = {refit.id for refit in before.finished}
    yield from (refit for refit in after.finished if refit.id not in known)


class _Gauges(Collector):
    def __init__(self, fleet: str, look: Callable[[], State], now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._look = look
        self._now = now

    def collect(self) -> Iterable[GaugeMetricFamily]:
        state = self._look()
        refit = state.active
        yield self._gauge("weight_version", "The committed weight version.", state.version)
        yield self._gauge("epoch", "The last epoch that any party has seen.", state.epoch)
        yield self._gauge(
            "engines_wanted", "Engines that the fleet should have.", state.roster.engines if state.roster else 0
        )
        yield self._gauge("trainer_sessions", "1 while a trainer holds the fleet.", int(state.session is not None))
        yield self._gauge(
            "phase_age_seconds",
            "Seconds since the phase of the refit under way began; 0 at rest.",
            max(self._now() - refit.phase_started, 0.0) if refit is not None else 0.0,
        )
        counts = count_states(state)
        engines = GaugeMetricFamily("rolloutfleet_engines", "Engines by their state.", labels=("fleet", "state"))
        for name in ENGINE_STATES:
            engines.add_metric((self._fleet, name), counts.pop(name, 0))
        for name, count in sorted(counts.items()):
            engines.add_metric((self._fleet, name), count)
        yield engines

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"rolloutfleet_{name}", text, labels=("fleet",))
        family.add_metric((self._fleet,), value)
        return family
