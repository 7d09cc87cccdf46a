"""The sync job's metrics: what they count, and that the page about them is right."""

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fakes.simulation import Simulation
from rolloutfleet.contract.trainer import Phase
from rolloutfleet_operator.metrics import Metrics as OperatorMetrics
from rolloutfleet_sync.metrics import Metrics
from rolloutfleet_sync.protocol import events
from rolloutfleet_sync.protocol.model import Identity, initial_state
from rolloutfleet_sync.protocol.summary import wall_clock
from rolloutfleet_sync.telling import Teller

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


class Watched(Simulation):
    """A simulation whose every state is told."""

    def __post_init__(self):
        super().__post_init__()
        self.metrics = Metrics("f", lambda: self.state, lambda: self.now)
        self.teller = Teller(self.metrics, wall_clock(1_700_000_000.0))

    def _step(self, event: events.Event) -> None:
        before = self.state
        super()._step(event)
        self.teller.note(before, self.state)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"rolloutfleet_{name}", {"fleet": "f", **labels})


@pytest.fixture
def sim() -> Watched:
    made = Watched()
    made.start()
    made.settle()
    return made


def test_a_refit_that_completes_is_counted_with_its_seconds_and_bytes(sim: Watched):
    sim.open_session()
    assert sim.run_refit(1).phase is Phase.COMPLETE
    assert sim.value("refits_total", outcome="Complete") == 1
    assert sim.value("refits_total", outcome="Failed") == 0
    assert sim.value("refit_seconds_count", phase="Transferring") == 1
    assert sim.value("refit_seconds_count", phase="Total") == 1
    assert sim.value("pause_seconds_count") == 1
    assert sim.value("straggler_seconds_count") == 1
    assert sim.value("refit_bytes_total") == sim.state.finished[-1].nbytes
    assert sim.value("weight_version") == 1
    assert sim.value("epoch") == sim.state.epoch
    assert sim.value("engines", state="Serving") == 2
    assert sim.value("phase_age_seconds") == 0


def test_gauges_of_a_sync_job_that_knows_nothing_yet_are_zero():
    state = initial_state(Identity("f", "ns", "uid", "m"), Watched().policy)
    metrics = Metrics("f", lambda: state, lambda: 0.0)
    assert metrics.registry.get_sample_value("rolloutfleet_weight_version", {"fleet": "f"}) == 0
    assert metrics.registry.get_sample_value("rolloutfleet_engines", {"fleet": "f", "state": "Dirty"}) == 0


def test_the_page_names_every_metric_with_its_type_and_labels(sim: Watched):
    sim.open_session()
    sim.run_refit(1)
    sim.metrics._aborts.labels("f", "Transferring", "MemberAbsent")
    sim.metrics._lost.labels("f", "Transferring")
    operator = OperatorMetrics()
    operator.note_pass(0.1, "TransientError", wrote=True)
    described = {}
    for metrics, common in ((sim.metrics, {"fleet"}), (operator, set())):
        text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text")
        for family in text_string_to_metric_families(text.decode()):
            labels = {label for sample in family.samples for label in sample.labels} - common - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            described[name] = (family.type, labels)
    told = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `rolloutfleet_"):
            name, kind, labels, _ = (cell.strip() for cell in line.strip("|").split("|"))
            told[name.strip("`")] = (kind, {label.strip("` ") for label in labels.split(",") if label})
    assert told == described
