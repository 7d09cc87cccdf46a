"""A small client of the Kubernetes API for the launcher's own few requests."""

import http.client
import json
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from localcluster.certificates import read_tokens
from localcluster.constants import API_PORT, LOOPBACK
from localcluster.errors import LauncherError
from localcluster.paths import Paths

SECONDS = 10.0
WORKERS = 16
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(LauncherError):
    """An answer of the API server that is not a success; `status` is the HTTP code."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ApiClient:
    """Requests as the cluster's administrator; every thread keeps a connection of its own."""

    def __init__(self, paths: Paths) -> None:
        self._token = read_tokens(paths)["admin"]
        self._context = ssl.create_default_context(cafile=str(paths.pki / "ca.crt"))
        self._local = threading.local()

    def _connection(self) -> http.client.HTTPSConnection:
        connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPSConnection(LOOPBACK, API_PORT, timeout=SECONDS, context=self._context)
            self._local.connection = connection
        return connection

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Decoded answer. Raises ApiError for a refusal, LauncherError when the server cannot be reached."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type, "Accept": "application/json"}
        connection = self._connection()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise LauncherError(f"the API server does not answer {method} {path}: {error}; see `status`") from error
        if answer.status >= 300:
            raise ApiError(
                answer.status, f"{method} {path}: HTTP {answer.status}: {text.decode(errors='replace')[:400]}"
            )
        return json.loads(text)

    def apply(self, path: str, manifest: dict[str, Any]) -> None:
        """Server-side apply of one object as field manager "localcluster"."""
        query = urllib.parse.urlencode({"fieldManager": "localcluster", "force": "true"})
        self.request("PATCH", f"{path}/{manifest['metadata']['name']}?{query}", manifest, APPLY_PATCH)

    def list_all(self, path: str, selector: str = "") -> list[dict[str, Any]]:
        """Items of a collection, all pages."""
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {
                "limit": "500",
                **({"labelSelector": selector} if selector else {}),
                **({"continue": token} if token else {}),
            }
            page = self.request("GET", f"{path}?{urllib.parse.urlencode(query)}")
            items += page["items"]
            token = page["metadata"].get("continue", "")
            if not token:
                return items


def in_parallel(action: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Runs `action` for every item, 16 at once. Raises the first error."""
    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(action, items):
            pass


def node_is_ready(node: dict[str, Any]) -> bool:
    """True when a Node object's Ready condition is True."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
