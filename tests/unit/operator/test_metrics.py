"""The operator's own metrics, and what its loops count in them."""

import pytest
from aiohttp import ClientSession, web

from rolloutfleet_operator.handlers.health import HealthServer
from rolloutfleet_operator.metrics import Metrics
from rolloutfleet_operator.reconcile.ticks import Ticks


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"rolloutfleet_operator_{name}", labels)


def test_passes_are_counted_with_their_seconds_errors_and_writes():
    metrics = Metrics()
    metrics.note_pass(0.2, "", wrote=True)
    metrics.note_pass(0.4, "AccessDenied", wrote=False)
    assert value(metrics, "passes_total", result="done") == 1
    assert value(metrics, "passes_total", result="error") == 1
    assert value(metrics, "errors_total", reason="AccessDenied") == 1
    assert value(metrics, "status_writes_total") == 1
    assert value(metrics, "pass_seconds_sum") == pytest.approx(0.6)


def test_fleets_are_counted_by_ready_until_they_are_gone():
    metrics = Metrics()
    metrics.note_fleet(("ns", "a"), "True")
    metrics.note_fleet(("ns", "b"), "False")
    metrics.note_fleet(("ns", "b"), "True")
    metrics.note_fleet(("ns", "c"), "")
    assert [value(metrics, "fleets", ready=status) for status in ("True", "False", "Unknown")] == [2, 0, 1]
    metrics.forget_fleet(("ns", "a"))
    assert value(metrics, "fleets", ready="True") == 1


async def test_metrics_are_answered_beside_the_liveness_probe():
    server = HealthServer(Ticks(lambda: 0.0), Metrics(), 0)
    await server.start()
    assert server._runner is not None
    port = next(address[1] for address in server._runner.addresses if address[0] == "0.0.0.0")
    try:
        async with ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.status == web.HTTPOk.status_code
            assert response.content_type == "text/plain"
            assert 'rolloutfleet_operator_passes_total{result="done"} 0.0' in await response.text()
    finally:
        await server.stop()
