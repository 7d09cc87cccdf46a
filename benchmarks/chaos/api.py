"""A small API server in a process of its own: one WeightSync and one ConfigMap, on disk, with a note of every version published.

Only what the sync job uses is here. ``PUT /roster`` is the operator's write, made by the supervisor.
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from rolloutfleet.contract.applying import APPLY_TYPE

NAMESPACE, FLEET = "chaos", "f"
PORT = 6443
_SYNC = f"/apis/rolloutfleet.io/v1alpha1/namespaces/{NAMESPACE}/weightsyncs/{FLEET}"
_CONFIGMAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"


class ApiServer:
    """Objects in a file; a write counts once it is there."""

    def __init__(self, folder: Path, write_seconds: float) -> None:
        self._file = folder / "etcd.json"
        self._published = folder / "published.jsonl"
        self._write_seconds = write_seconds
        stored = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._version: int = stored.get("version", 1)
        self._status: dict[str, Any] = stored.get("status", {})
        self._roster: str = stored.get("roster", "")
        self._changed = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get(_SYNC, self._get)
        app.router.add_patch(f"{_SYNC}/status", self._patch)
        app.router.add_get(_CONFIGMAPS, self._configmaps)
        app.router.add_put("/roster", self._put_roster)
        return app

    def _object(self) -> dict[str, Any]:
        metadata = {"name": FLEET, "resourceVersion": str(self._version), "generation": 1}
        return {"metadata": metadata, "spec": {"floor": {"epoch": 0, "version": 0}}, "status": self._status}

    def _store(self) -> None:
        self._version += 1
        fresh = self._file.with_suffix(".fresh")
        fresh.write_text(json.dumps({"version": self._version, "status": self._status, "roster": self._roster}))
        fresh.replace(self._file)

    async def _get(self, _: web.Request) -> web.Response:
        return web.json_response(self._object())

    async def _patch(self, request: web.Request) -> web.Response:
        if request.headers["Content-Type"] != APPLY_TYPE:
            raise web.HTTPUnsupportedMediaType
        body = await request.json()
        await asyncio.sleep(self._write_seconds)
        if body["metadata"]["resourceVersion"] != str(self._version):
            return web.json_response({"message": "the object has been modified"}, status=409)
        before = self._status.get("version", 0)
        self._status = body["status"]
        if self._status.get("version", 0) > before:
            # Noted before it is stored: a version must not be served before this line.
            with self._published.open("a") as notes:
                notes.write(json.dumps({"version": self._status["version"], "seconds": time.monotonic()}) + "\n")
        self._store()
        return web.json_response(self._object())

    async def _put_roster(self, request: web.Request) -> web.Response:
        self._roster = await request.text()
        self._store()
        self._changed.set()
        self._changed = asyncio.Event()
        return web.Response()

    def _item(self) -> dict[str, Any]:
        return {"metadata": {"name": f"{FLEET}-members"}, "data": {"members.json": self._roster}}

    async def _configmaps(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            items = [self._item()] if self._roster else []
            return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        if request.query["resourceVersion"] != str(self._version):
            await self._tell(response)
        while True:
            await self._changed.wait()
            await self._tell(response)

    async def _tell(self, response: web.StreamResponse) -> None:
        await response.write(json.dumps({"type": "MODIFIED", "object": self._item()}).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--write-seconds", type=float, default=0.0)
    options = parser.parse_args()
    app = ApiServer(options.folder, options.write_seconds).application()
    (options.folder / "api.pid").write_text(str(os.getpid()))
    web.run_app(app, host=options.host, port=PORT, print=lambda _: None, access_log=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
