"""The door inside vLLM's API server, driven as an ASGI application."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from rolloutfleet_worker.fence import Door
from rolloutfleet_worker.middleware import ENGINE_PREFIX, SECRET_HEADER, FleetMiddleware

SECRET = "s3cret"


class EngineDouble:
    """Stands for vLLM's engine client, and for the client of its core."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.resets = False
        self.failure: Exception | None = None
        self.engine_core = self
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=False), parallel_config=SimpleNamespace(data_parallel_size=1)
        )

    async def pause_scheduler_async(self, **options):
        self.calls.append(("pause-core", options))

    async def resume_scheduler_async(self):
        self.calls.append(("resume-core", {}))

    async def call_utility_all_async(self, method, version, reset_cache, pause, resume):
        told = {"version": version, "reset_cache": reset_cache, "pause": pause, "resume": resume}
        self.calls.append((method, told))
        if self.failure:
            raise self.failure
        cores = self.vllm_config.parallel_config.data_parallel_size
        resets = [self.resets] * cores if reset_cache else [None] * cores
        return [{"reset": reset, "pause_seconds": 0.008} for reset in resets]

    async def sleep(self, **options):
        self.calls.append(("sleep", options))

    async def wake_up(self, **options):
        self.calls.append(("wake", options))

    async def reset_prefix_cache(self, **options):
        self.calls.append(("reset", options))
        return self.resets

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

    async def door(self, door: Door, *, reason: str = "", version: int = 0):
        body = {"door": door, "reason": reason, "version": version}
        return await self.request(ENGINE_PREFIX + "door", body, secret=SECRET)


async def answering(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"text": "tokens"}'})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("ROLLOUTFLEET_ENGINE_SECRET", SECRET)
    monkeypatch.setenv("ROLLOUTFLEET_ENGINE_NAME", "f-0-0-0")
    return Server(answering, EngineDouble())


async def test_generation_is_refused_until_the_door_opens(server):
    status, body, headers = await server.request("/v1/completions")
    assert status == 503
    assert (
        "engine f-0-0-0 does not generate now: the sync job has not admitted this engine yet"
        in body["error"]["message"]
    )
    assert headers[b"retry-after"] == b"1"


async def test_generation_carries_engine_and_weight_version(server):
    await server.door(Door.OPEN, version=7)
    status, body, headers = await server.request("/v1/completions")
    assert (status, body) == (200, {"text": "tokens"})
    assert headers[b"x-rolloutfleet-engine"] == b"f-0-0-0"
    assert headers[b"x-rolloutfleet-weight-version"] == b"7"


@pytest.mark.scenario("F45")
async def test_requests_in_flight_end_with_503_when_the_door_closes(server):
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def generating(scope, receive, send):
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server.middleware = FleetMiddleware(generating)
    await server.door(Door.OPEN)
    request = asyncio.create_task(server.request("/v1/completions"))
    await entered.wait()
    await server.door(Door.CLOSED, reason="Dirty: half a version")
    status, body, _ = await request
    assert status == 503
    assert "Dirty: half a version" in body["error"]["message"]
    assert cancelled.is_set()


async def test_requests_wait_while_the_door_is_held(server):
    await server.door(Door.HELD)
    request = asyncio.create_task(server.request("/v1/completions"))
    await asyncio.sleep(0)
    assert not request.done()
    await server.door(Door.OPEN, version=8)
    status, _, headers = await request
    assert status == 200
    assert headers[b"x-rolloutfleet-weight-version"] == b"8"


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models"])
async def test_harmless_reads_pass_while_the_door_is_closed(server, path):
    assert (await server.request(path, method="GET"))[0] == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/responses/abc", "/resume", "/sleep", "/collective_rpc", "/anything"])
async def test_every_other_route_waits_at_the_door(server, path, method):
    assert (await server.request(path, method=method))[0] == 503


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
    assert server.engine.calls[0] == ("reset", {"reset_running_requests": True, "reset_connector": True})


async def test_a_pause_keeps_the_cache_for_the_commit_to_decide(server):
    await server.request(ENGINE_PREFIX + "pause", {"mode": "keep"}, secret=SECRET)
    assert server.engine.calls == [("pause-core", {"mode": "keep", "clear_cache": False})]


def swap_call(**told: bool) -> tuple[str, dict]:
    return "rolloutfleet_swap", {"version": 8, **told}


async def test_a_swap_is_one_call_of_the_core_and_names_the_new_version(server):
    await server.door(Door.OPEN, version=7)
    server.engine.resets = True
    body = {"version": 8, "reset_cache": True, "pause": True}
    status, answer, _ = await server.request(ENGINE_PREFIX + "swap", body, secret=SECRET)
    assert (status, answer) == (200, {"reset": True, "pause_seconds": 0.008})
    assert server.engine.calls == [swap_call(reset_cache=True, pause=True, resume=True)]
    assert (await server.request("/v1/completions"))[2][b"x-rolloutfleet-weight-version"] == b"8"


async def test_a_swap_in_a_paused_engine_neither_pauses_nor_resumes_it(server):
    body = {"version": 8, "reset_cache": False, "pause": False}
    _, answer, _ = await server.request(ENGINE_PREFIX + "swap", body, secret=SECRET)
    assert answer["reset"] is None
    assert server.engine.calls == [swap_call(reset_cache=False, pause=False, resume=False)]


async def test_several_cores_of_one_engine_resume_when_all_have_swapped(server):
    server.engine.vllm_config.parallel_config.data_parallel_size = 2
    server.engine.resets = True
    body = {"version": 8, "reset_cache": True, "pause": True}
    _, answer, _ = await server.request(ENGINE_PREFIX + "swap", body, secret=SECRET)
    assert answer["reset"] is True
    assert server.engine.calls == [swap_call(reset_cache=True, pause=True, resume=False), ("resume-core", {})]


@pytest.mark.scenario("F53")
async def test_several_cores_of_which_the_cache_is_not_reset_stay_stopped(server):
    server.engine.vllm_config.parallel_config.data_parallel_size = 2
    body = {"version": 8, "reset_cache": True, "pause": True}
    _, answer, _ = await server.request(ENGINE_PREFIX + "swap", body, secret=SECRET)
    assert answer["reset"] is False
    assert "resume-core" not in [name for name, _ in server.engine.calls]


async def test_a_swap_that_fails_says_why_and_leaves_scheduler_and_version_as_they_were(server):
    await server.door(Door.OPEN, version=7)
    server.engine.failure = RuntimeError("local rank 1 has version 6 staged, not 8")
    body = {"version": 8, "reset_cache": True, "pause": True}
    status, answer, _ = await server.request(ENGINE_PREFIX + "swap", body, secret=SECRET)
    assert (status, answer) == (500, {"message": "RuntimeError: local rank 1 has version 6 staged, not 8"})
    assert "resume-core" not in [name for name, _ in server.engine.calls]
    assert (await server.request("/v1/completions"))[2][b"x-rolloutfleet-weight-version"] == b"7"


@pytest.mark.row("A-U5")
async def test_sleep_aborts_what_runs_and_wake_takes_back_what_is_named(server):
    await server.request(ENGINE_PREFIX + "sleep", {"level": 2}, secret=SECRET)
    await server.request(ENGINE_PREFIX + "wake", {"tags": ["weights"]}, secret=SECRET)
    assert server.engine.calls == [("sleep", {"level": 2, "mode": "abort"}), ("wake", {"tags": ["weights"]})]


async def test_an_engine_without_sleep_mode_is_said_to_have_none(server):
    _, answer, _ = await server.request(ENGINE_PREFIX + "sleepless", secret=SECRET)
    assert "started without --enable-sleep-mode" in answer["reason"]
    server.engine.vllm_config.model_config.enable_sleep_mode = True
    assert (await server.request(ENGINE_PREFIX + "sleepless", secret=SECRET))[1] == {"reason": ""}
