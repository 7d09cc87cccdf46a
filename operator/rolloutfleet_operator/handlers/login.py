"""How kopf reaches the API server: as the gateway does, with credentials that are read anew before they run out."""

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

REREAD_AFTER = timedelta(minutes=10)
"""Service account tokens are rotated in their file; kopf alone would read them again only after a refusal."""


async def login(**kwargs: Any) -> kopf.ConnectionInfo:
    """The pod's service account, or else the kubeconfig.

    Raises:
        LoginError: there is neither.
    """
    account = kopf.login_with_service_account(**kwargs)
    if account is not None:
        return dataclasses.replace(account, expiration=datetime.now(UTC) + REREAD_AFTER)
    kubeconfig = kopf.login_with_kubeconfig(**kwargs)
    if kubeconfig is None:
        raise kopf.LoginError("neither a service account nor a kubeconfig to reach the API server with")
    return kubeconfig
