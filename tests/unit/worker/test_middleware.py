"""The fence inside vLLM's API server, driven as an ASGI application."""

import asyncio
import json

import pytest

from rolloutfleet_worker.middleware import ENGINE_PREFIX, SECRET_HEADER, FleetMiddleware

SECRET = "s3cret"


class EngineDouble:
    """Stands for vLLM's engine client."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    async def pause_generation(self, **options):
        self.calls.append(("pause", options))

    async def reset_prefix_cache(self, **options):
        self.calls.append(("reset", options))
        return False

    async def reset_encoder_cache(self):
        self.calls.append(("reset-encoder", {}))


class Server:
    def __init__(self, app, engine) -> None:
        self.middleware = FleetMiddleware(app)
        self.engine = engine

    async def request(self, path: str, body: dict | None = None, *, secret: str | None = None, method: str = "POST"):
        sent: list[dict] = []
        headers = [(SECRET_HEADER.encode(), secret.encode())] if secret else []
        app = type("App", (), {"state": type("State", (), {"engine_client": self.engine})})

        async def receive():
            return {"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": path, "method": method, "headers": headers, "app": app}
        await self.middleware(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"]), dict(sent[0]["headers"])

    async def fence(self, *, is_open: bool, reason: str = "", version: int = 0):
        return await self.request(
            ENGINE_PREFIX + "fence", {"open": is_open, "reason": reason, "version": version}, secret=SECRET
        )


async def answering(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"text": "tokens"}'})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("ROLLOUTFLEET_ENGINE_SECRET", SECRET)
    monkeypatch.setenv("ROLLOUTFLEET_ENGINE_NAME", "f-0-0-0")
    return Server(answering, EngineDouble())


async def test_generation_is_refused_until_the_fence_opens(server):
    status, body, headers = await server.request("/v1/completions")
    assert status == 503
    assert (
        "engine f-0-0-0 does not generate now: the sync job has not admitted this engine yet"
        in body["error"]["message"]
    )
    assert headers[b"retry-after"] == b"1"


async def test_generation_carries_engine_and_weight_version(server):
    await server.fence(is_open=True, version=7)
    status, body, headers = await server.request("/v1/completions")
    assert (status, body) == (200, {"text": "tokens"})
    assert headers[b"x-rolloutfleet-engine"] == b"f-0-0-0"
    assert headers[b"x-rolloutfleet-weight-version"] == b"7"


@pytest.mark.scenario("F45")
async def test_requests_in_flight_end_with_503_when_the_fence_closes(server):
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def generating(scope, receive, send):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server.middleware = FleetMiddleware(generating)
    await server.fence(is_open=True)
    request = asyncio.create_task(server.request("/v1/completions"))
    await entered.wait()
    await server.fence(is_open=False, reason="Dirty: half a version")
    status, body, _ = await request
    assert status == 503
    assert "Dirty: half a version" in body["error"]["message"]
    assert cancelled.is_set()


async def test_reads_pass_while_the_fence_is_closed(server):
    assert (await server.request("/metrics", method="GET"))[0] == 200


async def test_engine_routes_are_for_the_launcher_alone(server):
    for secret in (None, "wrong"):
        status, body, _ = await server.request(ENGINE_PREFIX + "pause", {"mode": "keep"}, secret=secret)
        assert status == 401
        assert "launcher alone" in body["message"]
    assert server.engine.calls == []


@pytest.mark.row("A42")
async def test_a_cache_reset_that_vllm_denies_is_reported_as_denied(server):
    status, body, _ = await server.request(ENGINE_PREFIX + "reset-cache", secret=SECRET)
    assert (status, body) == (200, {"reset": False})
    assert server.engine.calls[0] == ("reset", {"reset_running_requests": True})


async def test_a_pause_keeps_the_cache_for_the_commit_to_decide(server):
    await server.request(ENGINE_PREFIX + "pause", {"mode": "keep"}, secret=SECRET)
    assert server.engine.calls == [("pause", {"mode": "keep", "clear_cache": False})]
