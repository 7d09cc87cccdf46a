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


@pytest.mark.parametrize(
    ("environment", "preloaded", "sign"),
    [
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}, "", "CUDA_DEVICE_MEMORY_LIMIT_0 is set"),
        ({"LD_PRELOAD": "/usr/local/vgpu/libvgpu.so"}, "", "libvgpu.so is loaded into every process"),
        ({}, "/usr/local/vgpu/libvgpu.so\n", "libvgpu.so is loaded into every process"),
    ],
)
@pytest.mark.scenario("F30")
def test_an_engine_behind_a_virtual_gpu_layer_is_refused_before_it_can_hang(tmp_path, environment, preloaded, sign):
    (tmp_path / "preload").write_text(preloaded)
    with pytest.raises(SettingsError, match=sign) as refusal:
        read_settings(environment, tmp_path / "preload")
    assert "give engines whole GPUs" in str(refusal.value)
    with pytest.raises(SettingsError) as other:
        read_settings(environment | {"CUDA_DISABLE_CONTROL": "true"}, tmp_path / "preload")
    assert "virtual GPU layer" not in str(other.value)


def test_a_pod_without_a_grace_period_waits_for_nothing(tmp_path):
    (tmp_path / "token").write_text("secret")
    environment = {
        "ROLLOUTFLEET_FLEET": "f",
        "ROLLOUTFLEET_FLEET_UID": "u",
        "ROLLOUTFLEET_POD_NAME": "p",
        "ROLLOUTFLEET_POD_UID": "v",
        "ROLLOUTFLEET_ENGINE": "0",
        "ROLLOUTFLEET_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert read_settings(environment).grace_seconds == 0
    assert read_settings(environment | {"ROLLOUTFLEET_GRACE_SECONDS": "30"}).grace_seconds == 30
