"""The address at which workers reach the trainer."""

import socket

import pytest

from rolloutfleet.routing import hold_listening_socket, interface_of, local_address_towards


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


@pytest.mark.scenario("F29")
def test_a_port_whose_last_connections_still_linger_is_taken_again() -> None:
    with hold_listening_socket("127.0.0.1") as held:
        port = held.getsockname()[1]
        peer = socket.create_connection(("127.0.0.1", port))
        ours, _ = held.accept()
        ours.close()  # the side that closes first lingers in TIME_WAIT
        assert peer.recv(1) == b""
        peer.close()
    with hold_listening_socket("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_an_interface_is_known_by_its_address_and_an_address_of_nobody_has_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
    assert interface_of("::1") == ""
