"""From an address or a name, and a token from one of four places, to a target; every refusal says how to go on."""

from pathlib import Path

import pytest

from rolloutfleet.channel import Target
from rolloutfleet.connecting import default_namespace, find_token, resolve_target
from rolloutfleet.errors import Unauthorized

TARGET = Target(url="http://quickstart-sync.rl.svc:8080", fleet="quickstart", namespace="rl")


@pytest.mark.parametrize(
    ("address", "namespace", "expected"),
    [
        ("quickstart", "rl", TARGET),
        ("http://quickstart-sync.rl.svc:8080/", None, TARGET),
        ("http://quickstart-sync:8080", "rl", Target("http://quickstart-sync:8080", "quickstart", "rl")),
        ("http://127.0.0.1:8080", "rl", Target("http://127.0.0.1:8080", "NAME", "rl")),
    ],
)
def test_an_address_is_a_url_or_the_name_of_a_fleet(address: str, namespace: str | None, expected: Target) -> None:
    assert resolve_target(address, namespace) == expected


@pytest.mark.parametrize(
    "address", ["Quickstart", "rl/quickstart", "127.0.0.1:8080", "", "ftp://quickstart-sync", "http://"]
)
def test_an_address_that_is_neither_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(
        ValueError, match=r"neither a URL such as http://quickstart-sync.default:8080|is not an http://"
    ):
        resolve_target(address, "rl")


def test_the_namespace_comes_from_the_environment_else_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rolloutfleet.connecting.POD_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.delenv("ROLLOUTFLEET_NAMESPACE", raising=False)
    assert default_namespace() == "default"
    (tmp_path / "namespace").write_text("pods-own\n")
    assert default_namespace() == "pods-own"
    monkeypatch.setenv("ROLLOUTFLEET_NAMESPACE", "chosen")
    assert default_namespace() == "chosen"


def test_the_first_place_that_has_a_token_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given, mounted = tmp_path / "given", tmp_path / "mounted"
    given.write_text("from-file\n")
    mounted.write_text("from-mount\n")
    monkeypatch.setenv("ROLLOUTFLEET_TOKEN", "from-environment")
    assert find_token(TARGET, "from-argument", given, mounted) == "from-argument"
    assert find_token(TARGET, None, given, mounted) == "from-file"
    assert find_token(TARGET, None, None, mounted) == "from-environment"
    monkeypatch.delenv("ROLLOUTFLEET_TOKEN")
    assert find_token(TARGET, None, None, mounted) == "from-mount"


def test_without_a_token_the_error_prints_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ROLLOUTFLEET_TOKEN", raising=False)
    with pytest.raises(Unauthorized) as caught:
        find_token(TARGET, None, None, tmp_path / "token")
    assert "kubectl get secret quickstart-token -n rl -o jsonpath='{.data.token}' | base64 -d" in str(caught.value)
    assert "ROLLOUTFLEET_TOKEN" in str(caught.value)


@pytest.mark.parametrize("token", ["", "  \n", "two words", "töken"])
def test_a_token_that_cannot_be_one_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(Unauthorized, match="the token from token= is empty or holds spaces"):
        find_token(TARGET, token, None)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unauthorized, match=f"token file {tmp_path / 'absent'} cannot be read: No such file"):
        find_token(TARGET, None, tmp_path / "absent")
