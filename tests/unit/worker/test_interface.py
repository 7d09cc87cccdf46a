"""Where NCCL listens in an engine's pod: at the pod's own address, whatever other interfaces there are."""

import pytest

from rolloutfleet.routing import interface_of
from rolloutfleet_worker import interface
from rolloutfleet_worker.interface import own_interface

POD = "10.244.1.7"


@pytest.fixture(autouse=True)
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "interface_of", lambda address: {POD: "net1"}.get(address, interface_of(address)))


@pytest.mark.scenario("F29")
def test_nccl_listens_on_the_interface_of_the_pods_address_alone():
    assert own_interface(POD, {}) == {"NCCL_SOCKET_IFNAME": "=net1"}


def test_an_interface_that_the_pod_names_is_left_alone():
    assert own_interface(POD, {"NCCL_SOCKET_IFNAME": "ib0"}) == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "2001:db8::7"])
def test_an_address_that_names_no_interface_leaves_the_choice_to_nccl(address: str):
    assert own_interface(address, {}) == {}
