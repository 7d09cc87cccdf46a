"""What `helm test` runs in the cluster, against answers of an API server."""

import importlib.util
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "charts" / "rolloutfleet" / "files" / "installation.py"
GROUP = "/apis/rolloutfleet.io/v1alpha1"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/system/leases/operator"
SERVED = [{"name": name} for name in ("rolloutfleets", "rolloutfleets/status", "weightsyncs", "weightsyncs/status")]


def lease(seconds_ago: float, holder: str = "pod-1") -> dict[str, Any]:
    renewed = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    return {"spec": {"holderIdentity": holder, "renewTime": renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(script: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], *watched: str) -> str | None:
    def get(path: str) -> Any:
        if path not in answers:
            raise urllib.error.HTTPError(path, 403, "Forbidden", Message(), None)
        return answers[path]

    monkeypatch.setattr(script, "get", get)
    return script.find_fault("system", "operator", watched)


WELL = {GROUP: {"resources": SERVED}, f"{GROUP}/rolloutfleets?limit=1": {}, LEASE: lease(1)}


def test_a_working_installation_has_no_fault(script, monkeypatch):
    assert ask(script, monkeypatch, WELL) is None


def test_a_kind_that_is_not_served_is_named(script, monkeypatch):
    answers = {**WELL, GROUP: {"resources": SERVED[:3]}}
    assert ask(script, monkeypatch, answers) == "the API server does not serve weightsyncs/status"


def test_a_right_that_is_missing_is_named(script, monkeypatch):
    fault = ask(script, monkeypatch, WELL, "team-a")
    assert fault == f"GET {GROUP}/namespaces/team-a/rolloutfleets?limit=1: HTTP Error 403: Forbidden"


def test_an_operator_that_stopped_renewing_is_a_fault(script, monkeypatch):
    fault = ask(script, monkeypatch, {**WELL, LEASE: lease(300)})
    assert fault == "the operator renewed Lease operator 300 seconds ago"


def test_a_lease_that_nobody_holds_is_a_fault(script, monkeypatch):
    fault = ask(script, monkeypatch, {**WELL, LEASE: lease(1, holder="")})
    assert fault == "nobody holds Lease operator: the operator is not running"
