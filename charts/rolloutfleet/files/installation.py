"""Asks the API server, as the operator, whether the installation works: CRDs served, rights granted, operator alive."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUP = "/apis/rolloutfleet.io/v1alpha1"
RESOURCES = frozenset({"rolloutfleets", "rolloutfleets/status", "weightsyncs", "weightsyncs/status"})
LEASE_SECONDS = 60
PATIENCE_SECONDS = 60


def get(path: str) -> Any:
    """The API server's answer to a GET; urllib.error.URLError when there is none or it refuses."""
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    request = urllib.request.Request(f"https://kubernetes.default.svc{path}", headers=headers)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        return json.load(answer)


def find_fault(namespace: str, lease: str, watched: Sequence[str]) -> str | None:
    """What is missing, in one sentence; None when nothing is."""
    path = GROUP
    try:
        missing = sorted(RESOURCES - {resource["name"] for resource in get(path)["resources"]})
        if missing:
            return f"the API server does not serve {', '.join(missing)}"
        for scope in [f"/namespaces/{name}" for name in watched] or [""]:
            path = f"{GROUP}{scope}/rolloutfleets?limit=1"
            get(path)
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
        spec = get(path)["spec"]
    except urllib.error.URLError as error:
        return f"GET {path}: {error}"
    if not spec.get("holderIdentity"):
        return f"nobody holds Lease {lease}: the operator is not running"
    age = (datetime.now(UTC) - datetime.fromisoformat(spec["renewTime"])).total_seconds()
    return f"the operator renewed Lease {lease} {age:.0f} seconds ago" if age > LEASE_SECONDS else None


def main() -> None:
    """Ends with an error when a fault is still there after a minute."""
    watched = [name for name in os.environ["WATCHED_NAMESPACES"].split(",") if name]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while fault := find_fault(os.environ["NAMESPACE"], os.environ["LEASE"], watched):
        if time.monotonic() > deadline:
            sys.exit(fault)
        time.sleep(1)
    sys.stdout.write("CRDs are served, the operator may read fleets and holds its Lease\n")


if __name__ == "__main__":
    main()
