"""How the process learns what it is."""

from pathlib import Path

import pytest

from rolloutfleet.contract.policy import Transport
from rolloutfleet_sync.settings import SettingsError, build_parser, read_settings

ROSTER = '{"fleet": "demo", "fleetUid": "uid", "engines": 0, "members": []}'


@pytest.fixture
def token(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("secret\n")
    return str(tmp_path / "token")


def test_a_pod_is_told_everything_by_its_environment(token: str):
    environment = {
        "ROLLOUTFLEET_FLEET": "f",
        "ROLLOUTFLEET_FLEET_UID": "uid",
        "ROLLOUTFLEET_NAMESPACE": "ns",
        "ROLLOUTFLEET_WEIGHTSYNC": "f",
        "ROLLOUTFLEET_MODEL": "m",
        "ROLLOUTFLEET_TOKEN_FILE": token,
        "ROLLOUTFLEET_REFIT_POLICY": '{"transport": "Native", "deadlines": {"formingSeconds": 7}}',
    }
    settings = read_settings([], environment)
    assert (settings.fleet, settings.namespace, settings.weightsync, settings.token) == ("f", "ns", "f", "secret")
    assert settings.policy.transport is Transport.NATIVE
    assert settings.policy.deadlines.forming_seconds == 7
    with pytest.raises(SettingsError, match="--model or the variable ROLLOUTFLEET_MODEL must be set"):
        read_settings([], {key: value for key, value in environment.items() if key != "ROLLOUTFLEET_MODEL"})


def test_by_hand_the_roster_file_says_whose_it_is(tmp_path: Path, token: str):
    roster = tmp_path / "roster.json"
    roster.write_text(ROSTER)
    arguments = ["--roster", str(roster), "--status", "s.json", "--token-file", token, "--model", "m"]
    settings = read_settings(arguments, {})
    assert (settings.fleet, settings.fleet_uid, settings.policy.transport) == ("demo", "uid", Transport.AUTO)


def test_the_help_shows_a_command_that_works():
    text = build_parser().format_help()
    assert "python3 -m rolloutfleet_sync --roster roster.json --status status.json" in text
