"""The address at which workers reach the trainer."""

import socket

import pytest

from rolloutfleet.routing import hold_listening_socket, local_address_towards


@pytest.mark.scenario("F01")
@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])
def test_a_wildcard_is_never_listened_on_or_advertised(address: str) -> None:
    with pytest.raises(ValueError, match="peers need an address they can reach"):
        hold_listening_socket(address)


@pytest.mark.scenario("F01")
def test_the_local_address_is_the_one_that_routes_to_the_peer() -> None:
    assert local_address_towards("127.0.0.1", 8001) == "127.0.0.1"


@pytest.mark.row("A-U8")
@pytest.mark.scenario("F11")
def test_the_port_stays_taken_while_the_socket_is_held() -> None:
    with hold_listening_socket("127.0.0.1") as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(held.getsockname())
