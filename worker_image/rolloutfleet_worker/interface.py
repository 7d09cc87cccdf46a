"""The network interface on which NCCL listens in a pod."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final

from rolloutfleet.routing import interface_of

NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"


def own_interface(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Has NCCL listen where the pod's own address is: left to itself it takes the first interface that it finds, which may be a bridge.

    Nothing for an address that is not an interface's (IPv6, loopback), or where the pod's environment names one.
    """
    if NCCL_INTERFACE in environment or ip_address(address).is_loopback:
        return {}
    name = interface_of(address)
    return {NCCL_INTERFACE: f"={name}"} if name else {}
