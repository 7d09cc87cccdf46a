"""The security context of every pod: no root, no privilege, nothing to write but its volumes."""

from typing import Any

USER_ID = 65532


def pod_security() -> dict[str, Any]:
    """The pod's security context."""
    return {
        "fsGroup": USER_ID,
        "runAsGroup": USER_ID,
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """The container's security context."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
