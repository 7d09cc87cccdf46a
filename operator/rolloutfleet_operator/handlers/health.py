"""Liveness, true while every loop is heard of in time, and metrics. Both answer from the process's start, Lease or not."""

from aiohttp import web

from rolloutfleet_operator.metrics import Metrics
from rolloutfleet_operator.reconcile.ticks import Ticks


class HealthServer:
    """``GET /healthz``: 200 while all loops turn, 500 with the names of those that do not; ``GET /metrics`` for Prometheus."""

    def __init__(self, ticks: Ticks, metrics: Metrics, port: int) -> None:
        self._ticks = ticks
        self._metrics = metrics
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens from now on.

        Raises:
            OSError: the port is taken.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._answer)
        app.router.add_get("/metrics", self._measure)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, port=self._port).start()

    async def stop(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _measure(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _answer(self, _: web.Request) -> web.Response:
        overdue = self._ticks.overdue()
        if overdue:
            return web.json_response({"overdue": overdue}, status=500)
        return web.json_response({"overdue": []})
