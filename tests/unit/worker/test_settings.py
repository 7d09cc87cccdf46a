"""The launcher's environment: everything that is wrong is named at once."""

import pytest

from rolloutfleet_worker.settings import SettingsError, read_settings


@pytest.mark.row("A09")
def test_all_missing_and_wrong_variables_are_named_in_one_message(tmp_path):
    with pytest.raises(SettingsError) as error:
        read_settings(
            {"ROLLOUTFLEET_FLEET": "f", "ROLLOUTFLEET_RANKS": "two", "ROLLOUTFLEET_TOKEN_FILE": str(tmp_path / "none")}
        )
    message = str(error.value)
    for words in (
        "ROLLOUTFLEET_FLEET_UID is not set",
        "ROLLOUTFLEET_POD_NAME is not set",
        "ROLLOUTFLEET_ENGINE is not set",
    ):
        assert words in message
    assert "ROLLOUTFLEET_RANKS is 'two', not a whole number" in message
    assert "which holds no token" in message


def test_a_full_environment_gives_settings(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    settings = read_settings(
        {
            "ROLLOUTFLEET_FLEET": "f",
            "ROLLOUTFLEET_FLEET_UID": "u",
            "ROLLOUTFLEET_POD_NAME": "f-1-0-0",
            "ROLLOUTFLEET_POD_UID": "p",
            "ROLLOUTFLEET_ENGINE": "1",
            "ROLLOUTFLEET_RANKS": "2",
            "ROLLOUTFLEET_TOKEN_FILE": str(tmp_path / "token"),
            "ROLLOUTFLEET_AWAIT_FIRST_REFIT": "true",
        }
    )
    assert (settings.engine, settings.ranks, settings.token, settings.await_first_refit) == (1, 2, "secret", True)
    assert (settings.generation_port, settings.control_port) == (8000, 8001)


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_PLUGINS"])
def test_variables_that_open_a_back_door_are_refused_by_name(tmp_path, name):
    with pytest.raises(SettingsError, match=f"{name} is set; "):
        read_settings({"ROLLOUTFLEET_TOKEN_FILE": str(tmp_path / "none"), name: "1"})
