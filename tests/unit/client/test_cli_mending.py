"""``rolloutfleet release`` and ``rolloutfleet revive``: what they ask for, and what they say when they cannot."""

from typing import Any, Self

import pytest
import urllib3
from kubernetes import client

from rolloutfleet.cli import cluster, main, releasing
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.revival import ANNOTATION, parse_revival, render_revival
from rolloutfleet.contract.trainer import FleetView, Phase
from rolloutfleet.errors import FleetUnreachable, Unauthorized

HELD = "the refit of version 8 failed: f-1-0-0 was lost"


def view(held: str) -> FleetView:
    return FleetView(
        fleet="f",
        namespace="rl",
        fleet_uid="u",
        model="m",
        phase=Phase.READY,
        epoch=4,
        version=7,
        held=held,
        transport=Transport.LAYOUT,
        engines=2,
        members=(),
        endpoints=(),
    )


class HeldFleet:
    """A fleet behind ``connect``, held until it is released."""

    def __init__(self, held: str, after: str = "") -> None:
        self.name, self.namespace = "f", "rl"
        self.held, self.after, self.released = held, after, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def view(self) -> FleetView:
        return view(self.held)

    def release(self) -> FleetView:
        self.released += 1
        return view(self.after)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    def go(found: HeldFleet | Exception, *options: str) -> tuple[int, dict[str, Any]]:
        def connect(address: str, **given: Any) -> HeldFleet:
            asked.update(given, address=address)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(releasing, "connect", connect)
        return main(["release", "f", *options]), asked

    return go


def test_a_held_fleet_is_released_and_told_since_when_it_was_held(release, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = HeldFleet(HELD)
    status, asked = release(fleet, "-n", "rl", "--token-file", "/t")
    assert (status, fleet.released) == (0, 1)
    assert (asked["address"], asked["namespace"], str(asked["token_file"])) == ("f", "rl", "/t")
    told = capsys.readouterr().out
    assert told == f"released rl/f: its whole engines serve version 7 again within seconds (held since {HELD})\n"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (HeldFleet(""), "fleet rl/f holds no engine back, so there is nothing to release"),
        (HeldFleet(HELD, after="the refit of version 9 failed"), "fleet rl/f is held again: the refit of version 9"),
        (FleetUnreachable("no answer from fleet f at http://f-sync.rl.svc:8080"), "no answer from fleet f at"),
        (Unauthorized("no token for fleet f"), "no token for fleet f"),
        (ValueError("address 'F' is neither a URL nor a fleet's name"), "address 'F' is neither"),
    ],
)
def test_what_keeps_a_fleet_from_being_released_is_told(
    release, capsys: pytest.CaptureFixture[str], found: Any, words: str
) -> None:
    assert release(found)[0] == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"rolloutfleet: {words}")
    assert told.err.count("\n") == 1


def test_a_fleet_that_is_nowhere_is_told_with_what_to_look_at(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTFLEET_TOKEN", "t")
    assert main(["release", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert "no answer from fleet" in told
    assert "kubectl port-forward" in told


def fleet_object(*retired: int, annotations: dict[str, str] | None = None, revived: str = "") -> dict:
    records = [{"engine": engine, "revision": "r", "retired": engine in retired} for engine in range(5)]
    return {
        "metadata": {"name": "f", "namespace": "rl", **({"annotations": annotations} if annotations else {})},
        "status": {"recovery": {"engines": records, "revived": revived}},
    }


class ScriptedApi:
    """Answers as the Kubernetes client does, and notes what is patched."""

    def __init__(self, fleets: list[dict] | Exception, refusal: Exception | None = None) -> None:
        self.fleets, self.refusal = fleets, refusal
        self.patches: list[tuple[Any, ...]] = []

    def list_namespaced_custom_object(self, group: str, version: str, namespace: str, plural: str, **_: Any) -> dict:
        if isinstance(self.fleets, Exception):
            raise self.fleets
        self.namespace = namespace
        return {"items": self.fleets}

    def patch_namespaced_custom_object(self, *given: Any, _content_type: str, _request_timeout: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert _content_type == "application/merge-patch+json"
        self.patches.append(given)


@pytest.fixture
def revive(monkeypatch: pytest.MonkeyPatch):
    def go(api: ScriptedApi, *options: str) -> int:
        monkeypatch.setattr(
            cluster, "_connect", lambda options: (client.ApiClient(client.Configuration(host="https://10.0.0.1")), "rl")
        )
        monkeypatch.setattr(cluster.client, "CustomObjectsApi", lambda _: api)
        return main(["revive", "f", *options])

    return go


def asked_for(api: ScriptedApi) -> frozenset[int] | None:
    ((group, version, namespace, plural, name, body),) = api.patches
    assert (group, version, namespace, plural, name) == (
        "rolloutfleet.io",
        "v1alpha1",
        api.namespace,
        "rolloutfleets",
        "f",
    )
    return parse_revival(body["metadata"]["annotations"][ANNOTATION])


def test_the_named_engines_and_no_others_get_another_chance(revive, capsys: pytest.CaptureFixture[str]) -> None:
    api = ScriptedApi([fleet_object(1, 2, 3)])
    assert revive(api, "3", "1", "3") == 0
    assert asked_for(api) == {1, 3}
    assert capsys.readouterr().out.startswith(
        "engines 1, 3 get another chance in fleet rl/f; watch: rolloutfleet status f"
    )


def test_all_means_every_engine_that_is_retired(revive, capsys: pytest.CaptureFixture[str]) -> None:
    api = ScriptedApi([fleet_object(2)])
    assert revive(api, "--all", "-n", "other") == 0
    assert asked_for(api) is None
    assert api.namespace == "other"
    assert "engine 2 gets another chance" in capsys.readouterr().out


def test_what_was_asked_for_and_not_obeyed_yet_is_not_lost(revive) -> None:
    waiting = render_revival([1], "then")
    api = ScriptedApi([fleet_object(1, 2, annotations={ANNOTATION: waiting}, revived="before")])
    assert revive(api, "2") == 0
    assert asked_for(api) == {1, 2}
    obeyed = ScriptedApi([fleet_object(1, 2, annotations={ANNOTATION: waiting}, revived=waiting)])
    assert revive(obeyed, "2") == 0
    assert asked_for(obeyed) == {2}
    all_of_them = ScriptedApi([fleet_object(1, 2, annotations={ANNOTATION: "monday"}, revived="before")])
    assert revive(all_of_them, "2") == 0
    assert asked_for(all_of_them) is None


@pytest.mark.parametrize(
    ("api", "options", "words"),
    [
        (
            ScriptedApi([]),
            ("1",),
            "no fleet f in namespace rl; there is none. Look for it with: rolloutfleet status -A",
        ),
        (ScriptedApi([fleet_object(1)]), ("0",), "engine 0 of fleet rl/f is not retired; retired are: 1"),
        (ScriptedApi([fleet_object(1)]), ("77",), "engine 77 of fleet rl/f is not retired; retired are: 1"),
        (
            ScriptedApi([fleet_object()]),
            ("--all",),
            "no engine of fleet rl/f is retired, so there is nothing to revive",
        ),
        (ScriptedApi([{"metadata": {"name": "f", "namespace": "rl"}}]), ("1",), "no engine of fleet rl/f is retired"),
        (
            ScriptedApi([fleet_object(1)], client.ApiException(status=403, reason="no")),
            ("1",),
            (
                "you may not patch rolloutfleets in namespace rl; ask for that right, or name a namespace with -n. "
                "Check with: kubectl auth can-i patch rolloutfleets.rolloutfleet.io -n rl"
            ),
        ),
        (
            ScriptedApi(urllib3.exceptions.HTTPError("HTTPSConnection: connection refused")),
            ("1",),
            "the API server https://10.0.0.1 does not answer: connection refused. See `kubectl version`",
        ),
        (
            ScriptedApi([fleet_object(1)], client.ApiException(status=409, reason="Conflict")),
            ("1",),
            "the API server refused to patch rolloutfleets in namespace rl: 409 Conflict",
        ),
    ],
)
def test_what_keeps_engines_from_another_chance_is_told(
    revive, capsys: pytest.CaptureFixture[str], api: ScriptedApi, options: tuple[str, ...], words: str
) -> None:
    assert revive(api, *options) == 1
    told = capsys.readouterr()
    assert (told.out, api.patches) == ("", [])
    assert told.err.startswith(f"rolloutfleet: {words}")
    assert told.err.count("\n") == 1


def test_more_engines_than_the_annotation_holds_are_refused(revive, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = fleet_object()
    fleet["status"]["recovery"]["engines"] = [{"engine": 1000 + n, "retired": True} for n in range(60)]
    api = ScriptedApi([fleet])
    assert revive(api, *(str(1000 + n) for n in range(60))) == 1
    assert "60 engines at once are more than the annotation rolloutfleet.io/revive holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["revive", "f"], "name the engines by their numbers, or give --all, one of the two"),
        (["revive", "f", "1", "--all"], "name the engines by their numbers, or give --all, one of the two"),
        (["revive", "f", "f-1-0-0"], "'f-1-0-0' is no engine; it is a whole number from 0"),
        (["revive", "f", "1", "-n", "a/b"], "'a/b' is no namespace; its name has lower-case letters"),
        (["release", "f", "-n", "RL"], "'RL' is no namespace"),
        (["refit", "f", "-n", "", "--checkpoint", "x", "--version", "1"], "'' is no namespace"),
        (["status", "-n", "x y"], "'x y' is no namespace"),
        (["release"], "the following arguments are required: FLEET"),
    ],
)
def test_wrong_arguments_are_told(command: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["release", "revive"])
def test_help_has_examples_and_exit_statuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert f"rolloutfleet {command} quickstart" in told
    assert "exit status:" in told


@pytest.mark.parametrize(
    ("value", "engines"),
    [
        ("1,3@monday", {1, 3}),
        ("0@1@2", {0}),
        ("monday", None),
        ("1764571234", None),
        ("1,@x", None),
        ("@x", None),
        ("a@b", None),
    ],
)
def test_a_value_names_engines_or_means_all(value: str, engines: set[int] | None) -> None:
    assert parse_revival(value) == engines
