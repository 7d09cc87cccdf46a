"""Where an engine listens: from a member's address to its URLs.

A member's address is an IPv4 or IPv6 address, for the ports that every pod has, or ``HOST:PORT`` where several engines share a host: then
that is the control port, and generation listens on the port below.
"""

from rolloutfleet.contract.names import GENERATION_PORT, WORKER_CONTROL_PORT


def control_base(address: str, default_port: int = WORKER_CONTROL_PORT) -> str:
    """Base URL of the launcher's control surface."""
    if address.count(":") == 1:
        return f"http://{address}"
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{default_port}"


def generation_base(address: str) -> str:
    """Base URL of the engine's OpenAI surface."""
    if address.count(":") == 1:
        host, _, port = address.partition(":")
        return f"http://{host}:{int(port) - 1}"
    return control_base(address, GENERATION_PORT)
