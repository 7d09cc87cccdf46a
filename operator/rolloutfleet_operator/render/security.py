"""The security context of every pod: no root, no privilege, nothing to write but its volumes."""

from collections.abc import Sequence
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


def container_security(added: Sequence[str] = ()) -> dict[str, Any]:
    """The container's security context, with these capabilities alone."""
    capabilities = {"add": list(added)} if added else {}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {**capabilities, "drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
