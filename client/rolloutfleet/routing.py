"""Which of this machine's addresses a peer can reach."""

import fcntl
import socket
import struct
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface, as netdevice(7) has it."""


def split_host_port(address: str, default_port: int) -> tuple[str, int]:
    """Host and port of ``HOST`` or ``HOST:PORT``; an IPv6 address is a host."""
    host, separator, port = address.rpartition(":")
    return (host, int(port)) if separator and ":" not in host and port.isdecimal() else (address, default_port)


def local_address_towards(host: str, port: int) -> str:
    """The local IP address that the kernel would use to reach ``host``; nothing is sent.

    Raises OSError when the name does not resolve or no route exists.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface whose IPv4 address this is; empty where none has it, as for any IPv6 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def hold_listening_socket(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``address``; the port stays taken for as long as the socket is open.

    Raises ValueError for a wildcard address, OSError when it cannot be bound here.
    """
    if address in {"", "0.0.0.0", "::"}:  # noqa: S104
        raise ValueError(f"cannot listen on the wildcard address {address!r}: peers need an address they can reach")
    family, kind, protocol, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(resolved)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening
