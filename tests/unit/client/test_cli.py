"""The status command on stored objects: what a person sees."""

import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import yaml
from kubernetes import client
from rich.console import Console

from rolloutfleet.cli import arguments, cluster, installed, main, status, table
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.summary import show_age, summarize_fleet

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def fleet_object(**status_fields) -> dict:
    return {
        "metadata": {"name": "quickstart", "namespace": "rl", "creationTimestamp": "2026-05-01T11:00:00Z"},
        "spec": {"replicas": 2, "model": {"name": "tiny-qwen2"}},
        "status": {
            "readyReplicas": 1,
            "weights": {"epoch": 4, "version": 7, "target": 8, "skew": 1},
            "endpoints": {"generation": "http://quickstart.rl.svc:8000", "sync": "http://quickstart-sync.rl.svc:8080"},
            "conditions": [
                condition("Ready", "False", "EnginesStarting", "1 of 2 engines is Ready"),
                condition("Stalled", "False", "Progressing", ""),
            ],
            **status_fields,
        },
    }


def condition(kind: str, verdict: str, reason: str, message: str) -> dict:
    return {
        "type": kind,
        "status": verdict,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-05-01T11:55:30Z",
    }


def sync_object(last_refit: dict | None) -> dict:
    return {
        "metadata": {"name": "quickstart", "namespace": "rl"},
        "spec": {"fleetRef": {"name": "quickstart"}},
        "status": {
            "phase": "Transferring",
            "session": {"id": "s1", "trainer": "trainer-0/42"},
            "lastRefit": last_refit,
            "conditions": [condition("Active", "True", "ServingFleet", "")],
        },
    }


def pod_object(
    name: str, engine: str | None, *, ready: bool, waiting: str | None = None, role: str | None = "sync"
) -> dict:
    labels = {"rolloutfleet.io/fleet": "quickstart"}
    labels |= {"rolloutfleet.io/role": role} if engine is None and role is not None else {}
    labels |= {} if engine is None else {"rolloutfleet.io/engine": engine, "rolloutfleet.io/role": "leader"}
    return {
        "metadata": {"name": name, "namespace": "rl", "labels": labels, "creationTimestamp": "2026-05-01T11:59:00Z"},
        "spec": {"nodeName": f"node-{engine}"},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [
                {"restartCount": 3, "state": {"waiting": {"reason": waiting}} if waiting else {"running": {}}}
            ],
        },
    }


COMPLETE = {
    "outcome": "Complete",
    "version": 7,
    "epoch": 4,
    "finishedAt": "2026-05-01T11:50:00Z",
    "members": 2,
    "tensors": 26,
    "nbytes": 2_000_000_000,
    "seconds": {"Transferring": 2.0, "Forming": 0.5, "Pausing": 0.01},
    "pauseSeconds": 2.2,
    "gigabytesPerSecond": 1.0,
}
FAILED = {
    "outcome": "Failed",
    "version": 8,
    "epoch": 5,
    "phase": "Forming",
    "member": "quickstart-1-0-0",
    "code": "MemberAbsent",
    "message": "no word from quickstart-1-0-0 for 120 s",
    "finishedAt": "2026-05-01T11:50:00Z",
}
PODS = (
    pod_object("quickstart-sync-abc", None, ready=True),
    pod_object("quickstart-1-0-0", "1", ready=False, waiting="CrashLoopBackOff"),
    pod_object("quickstart-0-0-0", "0", ready=True),
)


def drawn(fleet: dict, last_refit: dict | None, pods=PODS, *, as_list: bool = False) -> str:
    summary = summarize_fleet(cluster.FleetObjects(fleet, (sync_object(last_refit),), pods), NOW)
    console = Console(file=io.StringIO(), width=200)
    console.print(table.draw_list([summary]) if as_list else table.draw_fleet(summary, NOW))
    return console.file.getvalue()


def test_the_last_refit_shows_how_its_weights_travelled() -> None:
    text = drawn(
        fleet_object(),
        COMPLETE
        | {
            "transport": "Layout",
            "reason": "Layout over NCCL: trainer and engines share no device",
            "staged": True,
            "detours": ["layers.0.mlp: packed by its kernel"],
            "slowest": "quickstart-1-0-0 rank 3",
        },
    )
    assert "Layout over NCCL: trainer and engines share no device (staged)" in text
    assert "through vLLM's loader: layers.0.mlp: packed by its kernel" in text
    assert "last to have it: quickstart-1-0-0 rank 3" in text


def test_one_fleet_shows_conditions_engines_weights_and_the_last_refit() -> None:
    text = drawn(fleet_object(), COMPLETE)
    assert "rl/quickstart  tiny-qwen2  1/2 engines ready  age 60m" in text
    assert "Ready      False   EnginesStarting  4m30s  1 of 2 engines is Ready" in text
    assert "version 7 → 8, epoch 4, 1 engine behind" in text
    assert "Transferring, held by trainer trainer-0/42" in text
    assert "26 tensors, 2.000 GB to 2 engines at 1.00 GB/s, paused 2.200 s" in text


def test_engines_come_in_order_before_the_sync_pod_with_the_reason_they_wait_for() -> None:
    lines = drawn(fleet_object(), COMPLETE).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("ENGINE"))
    rows = [line.split() for line in lines[start + 1 : start + 4]]
    assert rows == [
        ["0", "quickstart-0-0-0", "node-0", "True", "Running", "-", "3", "60s"],
        ["1", "quickstart-1-0-0", "node-1", "False", "CrashLoopBackOff", "-", "3", "60s"],
        ["sync", "quickstart-sync-abc", "node-None", "True", "Running", "-", "3", "60s"],
    ]


def test_pods_of_no_engine_are_called_what_they_are() -> None:
    pods = (
        pod_object("quickstart-repair-7-x1", None, ready=False, role="checkpoint"),
        pod_object("quickstart-checkpoint-8-x2", None, ready=False, role="checkpoint"),
        pod_object("quickstart-sync-abc-x3", None, ready=True),
        pod_object("quickstart-0-0-0", "0", ready=True),
        pod_object("quickstart-of-somebody", None, ready=True, role=None),
    )
    lines = drawn(fleet_object(), COMPLETE, pods).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("ENGINE"))
    assert [line.split()[:2] for line in lines[start + 1 : start + 6]] == [
        ["0", "quickstart-0-0-0"],
        ["-", "quickstart-of-somebody"],
        ["checkpoint", "quickstart-checkpoint-8-x2"],
        ["repair", "quickstart-repair-7-x1"],
        ["sync", "quickstart-sync-abc-x3"],
    ]


def test_engines_that_serve_an_older_version_by_leave_are_counted_apart() -> None:
    weights = {"epoch": 4, "version": 8, "target": 8, "skew": 3, "stale": 2}
    assert "3 engines behind, 2 of them stale by leave" in drawn(fleet_object(weights=weights), COMPLETE)


def test_phases_are_bars_in_their_order_scaled_to_the_longest() -> None:
    bars = [line.split() for line in drawn(fleet_object(), COMPLETE).splitlines() if line.strip().endswith(("█", "▏"))]
    assert [(bar[0], bar[1]) for bar in bars] == [("Forming", "0.500"), ("Pausing", "0.010"), ("Transferring", "2.000")]
    assert [bar[3].count("█") for bar in bars] == [table.BAR_CELLS // 4, 0, table.BAR_CELLS]


def test_a_failed_refit_shows_phase_member_and_message() -> None:
    text = drawn(fleet_object(), FAILED)
    assert "Failed: version 8, epoch 5, 10m ago" in text
    assert "in phase Forming at quickstart-1-0-0 (MemberAbsent): no word from quickstart-1-0-0 for 120 s" in text


def test_the_list_says_why_a_fleet_is_not_ready() -> None:
    text = drawn(fleet_object(), COMPLETE, as_list=True)
    row = next(line for line in text.splitlines() if line.startswith("rl"))
    assert row.split()[:7] == ["rl", "quickstart", "False", "1/2", "7", "→", "8"]
    assert "EnginesStarting: 1 of 2 engines is Ready" in row


def test_a_new_fleet_without_status_or_pods_is_drawn() -> None:
    fleet = fleet_object()
    del fleet["status"]
    text = drawn(fleet, None, pods=())
    assert "The operator has not reported on this fleet yet" in text
    assert "No pods yet." in text
    assert "none yet" in text


def test_without_the_right_to_list_pods_the_rest_is_still_shown() -> None:
    assert "You may not list pods here" in drawn(fleet_object(), COMPLETE, pods=None)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_json_and_yaml_hold_the_objects_themselves(output: str) -> None:
    found = [cluster.FleetObjects(fleet_object(), (sync_object(COMPLETE),), PODS)]
    text = status.render_objects(found, output)
    parsed = json.loads(text) if output == "json" else yaml.safe_load(text)
    assert parsed == [{"fleet": fleet_object(), "weightSyncs": [sync_object(COMPLETE)], "pods": list(PODS)}]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (119, "119s"), (125, "2m5s"), (600, "10m"), (7200, "2h"), (172800, "2d")],
)
def test_ages_read_as_those_of_kubectl(seconds: int, shown: str) -> None:
    assert show_age(datetime.fromtimestamp(NOW.timestamp() - seconds, UTC).isoformat(), NOW) == shown


class ScriptedApi:
    """Answers list calls from what it was given, as the Kubernetes client does."""

    def __init__(self, fleets: list[dict] | Exception) -> None:
        self._fleets = fleets

    def list_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, **_) -> dict:
        if isinstance(self._fleets, Exception):
            raise self._fleets
        return {"items": self._fleets if plural == "rolloutfleets" else []}


def reading(monkeypatch: pytest.MonkeyPatch, fleets: list[dict] | Exception, fleet: str | None):
    monkeypatch.setattr(cluster, "_connect", lambda options: (None, "rl"))
    connection = cluster.Cluster(arguments.parse(["status"]))
    connection._custom = ScriptedApi(fleets)
    return connection.fleets(arguments.parse(["status", *([fleet] if fleet else [])]))


def test_an_unknown_fleet_is_answered_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match="no fleet quikstart in namespace rl; there are: quickstart"):
        reading(monkeypatch, [fleet_object()], "quikstart")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            403,
            "you may not list rolloutfleets in namespace rl; .* kubectl auth can-i list rolloutfleets.rolloutfleet.io -n rl",
        ),
        (404, "this cluster has no rolloutfleets.rolloutfleet.io: is the operator installed"),
        (401, "does not accept the kubeconfig's credentials"),
    ],
)
def test_a_refusal_of_the_api_says_what_to_do(monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    with pytest.raises(Failure, match=words):
        reading(monkeypatch, client.ApiException(status=code, reason="no"), None)


def test_without_a_kubeconfig_the_command_says_so_and_fails(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["status", "--kubeconfig", str(tmp_path / "absent")]) == 1
    assert "rolloutfleet: no usable kubeconfig" in capsys.readouterr().err


def test_a_kubeconfig_that_is_no_yaml_is_told_in_one_line(capsys, tmp_path) -> None:
    (tmp_path / "config").write_text("a: [")
    assert main(["status", "--kubeconfig", str(tmp_path / "config")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("rolloutfleet: no usable kubeconfig: while parsing a flow node")
    assert told.count("\n") == 1


def test_an_api_server_that_does_not_answer_is_named_in_one_line(capsys, monkeypatch, tmp_path) -> None:
    settings = client.Configuration(host="https://127.0.0.1:9")
    settings.retries = False
    monkeypatch.setattr(cluster, "_connect", lambda options: (client.ApiClient(settings), "rl"))
    assert main(["status"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("rolloutfleet: the API server https://127.0.0.1:9 does not answer: ")
    assert (told.count("\n"), len(told) < 250) == (1, True)


def test_help_shows_examples_and_version_the_release(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "rolloutfleet status quickstart --watch" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("rolloutfleet 0.")


def test_plan_is_handed_to_the_distribution_that_brings_it(monkeypatch) -> None:
    given: list[list[str]] = []
    point = SimpleNamespace(load=lambda: lambda arguments: given.append(arguments) or 4)
    monkeypatch.setattr(installed, "entry_points", lambda group, name: [point] if name == "plan" else [])
    assert main(["plan", "-f", "x"]) == 4
    assert given == [["-f", "x"]]


def test_plan_without_the_operators_distribution_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(installed, "entry_points", lambda **_: ())
    assert main(["plan"]) == 1
    assert capsys.readouterr().err == (
        "rolloutfleet: plan comes with the distribution rolloutfleet-operator, which is not installed here: "
        "pip install rolloutfleet-operator\n"
    )


def test_without_the_extra_packages_the_command_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['kubernetes'] = None; sys.modules['rich'] = None\n"
        "import rolloutfleet.cli; sys.exit(rolloutfleet.cli.main(['status']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'rolloutfleet[cli]'" in done.stderr
