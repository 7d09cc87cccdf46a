"""Monitors, alerts and the dashboard of the chart: made when asked for, and true to the metrics that there are."""

import json
import re
from pathlib import Path

import yaml

from rolloutfleet.contract.names import SYNC_PORT
from rolloutfleet_operator import naming

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rolloutfleet"
KINDS = {"PodMonitor", "PrometheusRule", "ConfigMap"}
SUFFIXES = ("_bucket", "_sum", "_count")


def known_metrics() -> set[str]:
    return set(re.findall(r"^\| `(rolloutfleet_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def used_metrics(expression: str) -> set[str]:
    found = re.findall(r"\brolloutfleet_\w+", expression)
    known = known_metrics()
    return {
        next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end) and name not in known), name)
        for name in found
    }


def render(helm, *arguments: str) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for document in helm.render(*arguments):
        found.setdefault(document["kind"], []).append(document)
    return found


def test_nothing_of_monitoring_is_made_unless_asked_for(helm):
    rendered = render(helm)
    assert [document for kind in KINDS for document in rendered[kind]] == []


def test_operator_and_sync_jobs_are_found_by_their_labels_and_ports(helm):
    rendered = render(helm, "--set", "metrics.podMonitor.enabled=true")
    operator, sync = rendered["PodMonitor"]
    (deployment,) = rendered["Deployment"]
    assert operator["spec"]["selector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    ports = {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert operator["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert sync["spec"]["selector"]["matchLabels"] == {naming.LABEL_ROLE: naming.ROLE_SYNC}
    golden = yaml.safe_load((ROOT / "tests/unit/operator/golden/sync.yaml").read_text())
    job = next(document for document in golden if document["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert {
        "containerPort": SYNC_PORT,
        "name": sync["spec"]["podMetricsEndpoints"][0]["port"],
        "protocol": "TCP",
    } in container["ports"]
    assert sync["spec"]["namespaceSelector"] == {"any": True}


def test_a_namespaced_install_looks_for_sync_jobs_in_its_namespaces_alone(helm):
    rendered = render(helm, "--set", "metrics.podMonitor.enabled=true", "--set", "watch.namespaces={b,a}")
    assert rendered["PodMonitor"][1]["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


def test_alerts_use_metrics_that_there_are(helm):
    (rule,) = render(helm, "--set", "metrics.rules.enabled=true")["PrometheusRule"]
    rules = [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert len(rules) >= 4
    for alert in rules:
        assert used_metrics(alert["expr"]) <= known_metrics(), alert["alert"]
        assert used_metrics(alert["expr"]), alert["alert"]
        assert {"summary", "description"} == set(alert["annotations"])


def test_the_dashboard_is_json_and_its_panels_use_metrics_that_there_are(helm):
    (config,) = render(helm, "--set", "metrics.dashboard.enabled=true")["ConfigMap"]
    dashboard = json.loads(config["data"]["rolloutfleet.json"])
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in expressions:
        assert used_metrics(expression), expression
        assert used_metrics(expression) <= known_metrics(), expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
