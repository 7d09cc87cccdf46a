"""Rules of the wire contract that every party relies on."""

import pytest
from pydantic import ValidationError

from rolloutfleet.contract.authorization import carries_token
from rolloutfleet.contract.worker import Rendezvous


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7", "127.0.0.1", "::1"])
def test_workers_meet_at_an_address(host: str):
    assert Rendezvous(host=host, port=1).host == host


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "no address of one machine"),
        ("::", "no address of one machine"),
        ("224.0.0.1", "no address of one machine"),
        ("trainer.default", "host 'trainer.default' is not an IP address"),
        ("", "host '' is not an IP address"),
    ],
)
def test_workers_do_not_meet_anywhere_else(host: str, words: str):
    with pytest.raises(ValidationError, match=words):
        Rendezvous(host=host, port=1)


@pytest.mark.parametrize("header", ["Bearer t0ken", "bearer t0ken", "Bearer  t0ken "])
def test_the_token_opens(header: str):
    assert carries_token(header, "t0ken")


@pytest.mark.parametrize(
    "header", ["", "t0ken", "Basic t0ken", "Bearer", "Bearer t0ke", "Bearer \udcff\udce9", "Bearer é"]
)
def test_nothing_else_opens(header: str):
    assert not carries_token(header, "t0ken")


def test_a_server_without_a_token_is_closed():
    assert not carries_token("Bearer ", "")
