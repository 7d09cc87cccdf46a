"""A fake API server with one WeightSync and one ConfigMap: resourceVersions, conflicts, watches, and answers that get lost."""

import asyncio
import json
from typing import Any

from aiohttp import web

from rolloutfleet.contract.applying import APPLY_TYPE

SYNC = "/apis/rolloutfleet.io/v1alpha1/namespaces/ns/weightsyncs/f"
CONFIGMAPS = "/api/v1/namespaces/ns/configmaps"


class FakeApiServer:
    def __init__(self):
        self.version = 1
        self.status: dict[str, Any] = {}
        self.floor = {"epoch": 0, "version": 0}
        self.roster = ""
        self.requests: list[str] = []
        self.lose_answers = 0
        self.away = 0
        """Requests for the WeightSync that find nobody who could serve them."""
        self.cut_watches = 0
        """Watches that end in the middle of a line."""
        self.changed = asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get(SYNC, self._get)
        app.router.add_patch(f"{SYNC}/status", self._patch)
        app.router.add_get(CONFIGMAPS, self._configmaps)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    def touch(self, **status: Any) -> None:
        """Somebody else writes to the object."""
        self.version += 1
        self.status = {**self.status, **status}

    def change_roster(self, text: str) -> None:
        self.roster = text
        self.version += 1
        self.changed.set()

    def _object(self) -> dict[str, Any]:
        metadata = {"name": "f", "resourceVersion": str(self.version), "generation": 3}
        return {"metadata": metadata, "spec": {"floor": self.floor}, "status": self.status}

    async def _get(self, request: web.Request) -> web.Response:
        self.requests.append("GET")
        if self._is_away():
            return web.json_response({"message": "etcd has no leader"}, status=503)
        return web.json_response(self._object())

    async def _patch(self, request: web.Request) -> web.Response:
        self.requests.append("PATCH")
        if self._is_away():
            return web.json_response({"message": "etcd has no leader"}, status=503)
        assert request.query["fieldManager"] == "rolloutfleet-sync"
        assert request.headers["Content-Type"] == APPLY_TYPE
        body = await request.json()
        if body["metadata"]["resourceVersion"] != str(self.version):
            return web.json_response({"message": "the object has been modified"}, status=409)
        self.version += 1
        self.status = body["status"]
        if self.lose_answers:
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response(self._object())

    def _is_away(self) -> bool:
        self.away = max(self.away - 1, -1)
        return self.away >= 0

    async def _configmaps(self, request: web.Request) -> web.StreamResponse:
        assert request.query["fieldSelector"] == "metadata.name=f-members"
        item = {"metadata": {"name": "f-members"}, "data": {"members.json": self.roster}}
        if "watch" not in request.query:
            items = [item] if self.roster else []
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        await self.changed.wait()
        self.changed.clear()
        item = {"metadata": {"name": "f-members"}, "data": {"members.json": self.roster}}
        line = json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n"
        if self.cut_watches:
            self.cut_watches -= 1
            await response.write(line[:40])
            return response
        await response.write(line)
        await response.write(json.dumps({"type": "ERROR", "object": {"code": 410}}).encode() + b"\n")
        return response
