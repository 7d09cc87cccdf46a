"""The door to generation inside vLLM's API server, and the few engine calls that only that process can make.

vLLM adds this class through its own ``--middleware`` option. Whatever could show tokens passes while the door is open and waits while it is
held; when it closes, requests in flight end with 503 (or a broken stream), so that nobody reads tokens of half-loaded weights. Routes below
``/rolloutfleet/engine/`` belong to the pod's launcher alone, which proves itself with a secret made for this process.
"""

import asyncio
import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

from rolloutfleet.contract.names import HEADER_ENGINE, HEADER_WEIGHT_VERSION
from rolloutfleet.contract.worker import WakeTag
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS, version_folder
from rolloutfleet_worker.core_swap import CORE_SWAP
from rolloutfleet_worker.fence import Door
from rolloutfleet_worker.served_adapters import ServedAdapters

log = logging.getLogger(__name__)

ENGINE_PREFIX = "/rolloutfleet/engine/"
ENV_ENGINE_SECRET = "ROLLOUTFLEET_ENGINE_SECRET"  # noqa: S105 - the variable's name
ENV_ENGINE_NAME = "ROLLOUTFLEET_ENGINE_NAME"
SECRET_HEADER = "x-rolloutfleet-engine-secret"  # noqa: S105

_HARMLESS_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/v1/models", "/version"})

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class FleetMiddleware:
    """ASGI middleware: the door to generation, and the calls with which the launcher pauses, resumes and resets the engine."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._secret = os.environ[ENV_ENGINE_SECRET]
        self._engine_name = os.environ[ENV_ENGINE_NAME]
        self._door = Door.CLOSED
        self._reason = "the sync job has not admitted this engine yet"
        self._version = 0
        self._moved = asyncio.Condition()
        self._adapters = ServedAdapters()
        self._serving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(ENGINE_PREFIX):
            await self._serve_launcher(scope, receive, send)
        elif scope["type"] == "lifespan" or (scope["type"] == "http" and _is_harmless(scope)):
            await self._app(scope, receive, send)
        else:
            await self._serve_generation(scope, receive, send)

    async def _serve_generation(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *self._tags()]}
            await send(message)

        await self._await_door({Door.OPEN, Door.CLOSED})
        if self._door is Door.OPEN:
            request = asyncio.ensure_future(self._app(scope, receive, tagged))
            closing = asyncio.ensure_future(self._await_door({Door.CLOSED}))
            self._serving += 1
            try:
                await asyncio.wait({request, closing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._serving -= 1
                closing.cancel()
                if not request.done():
                    request.cancel()
            await asyncio.wait({request})
            if not request.cancelled():
                return request.result()
            if started:
                raise ConnectionAbortedError(f"generation ended early: {self._reason}")
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013, "reason": self._reason[:120]})
        else:
            message = f"engine {self._engine_name} does not generate now: {self._reason}"
            error = {"message": message, "type": "ServiceUnavailable", "code": 503}
            await _answer(send, 503, {"error": error}, [(b"retry-after", b"1")])
        return None

    async def _await_door(self, doors: AbstractSet[Door]) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._door in doors)

    def _tags(self) -> list[tuple[bytes, bytes]]:
        return [
            (HEADER_ENGINE.encode(), self._engine_name.encode()),
            (HEADER_WEIGHT_VERSION.encode(), str(self._version).encode()),
        ]

    async def _serve_launcher(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
        if not hmac.compare_digest(given, self._secret.encode()):
            await _answer(send, 401, {"message": f"{ENGINE_PREFIX} is for this pod's launcher alone"})
            return
        verbs: dict[str, Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "health": self._health,
            "serving": self._count_serving,
            "pause": self._pause,
            "resume": self._resume,
            "reset-cache": self._reset_cache,
            "door": self._set_door,
            "swap": self._swap,
            "serve-adapter": partial(self._serve_adapter, scope["app"].state),
            "withdraw-adapters": partial(self._withdraw_adapters, scope["app"].state),
            "sleepless": self._sleepless,
            "sleep": self._sleep,
            "wake": self._wake,
        }
        call = verbs.get(scope["path"].removeprefix(ENGINE_PREFIX))
        if call is None:
            await _answer(send, 404, {"message": f"no such route: {scope['path']}"})
            return
        try:
            answer = await call(scope["app"].state.engine_client, json.loads(await _body(receive) or b"{}"))
        except Exception as error:
            # The outermost loop of the launcher's calls. What fails in vLLM's core arrives as a bare Exception; its words are the cause.
            log.exception("%s failed", scope["path"])
            await _answer(send, 500, {"message": f"{type(error).__name__}: {error}"})
            return
        await _answer(send, 200, answer)

    async def _health(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """A round trip through the engine's own loop: an answer here means more than a live web server."""
        await engine.check_health()
        return {"paused": await engine.is_paused()}

    async def _count_serving(self, _: Any, __: dict[str, Any]) -> dict[str, Any]:
        return {"requests": self._serving}

    async def _pause(self, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        # AsyncLLM.pause_generation sleeps another 20 ms, in which nothing could run.
        await engine.engine_core.pause_scheduler_async(mode=body["mode"], clear_cache=False)
        return {}

    async def _resume(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        await engine.resume_generation()
        return {}

    async def _reset_cache(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        """Requests that a pause froze are preempted, so that their cache is computed anew with the new weights."""
        reset: bool
        reset, _ = await asyncio.gather(
            engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True), engine.reset_encoder_cache()
        )
        return {"reset": reset}

    async def _swap(self, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        """Copies the staged version into the live weights while no step runs, and names it in answers from then on.

        The engine's core does all of it in one call (:mod:`rolloutfleet_worker.core_swap`). When anything fails the scheduler stays
        stopped, for the launcher to close the door.
        """
        core = engine.engine_core
        # Several cores resume together, and none of them before all have swapped: one that failed would be waited for.
        alone = engine.vllm_config.parallel_config.data_parallel_size == 1
        began = time.perf_counter()
        answers = await core.call_utility_all_async(
            CORE_SWAP, body["version"], body["reset_cache"], body["pause"], body["pause"] and alone
        )
        reset = all(answer["reset"] for answer in answers) if body["reset_cache"] else None
        self._version = body["version"]
        if alone:
            return {"reset": reset, "pause_seconds": answers[0]["pause_seconds"]}
        if body["pause"] and reset is not False:
            await core.resume_scheduler_async()
        return {"reset": reset, "pause_seconds": time.perf_counter() - began}

    async def _serve_adapter(self, state: Any, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        """Loading runs on the engine's own loop between two steps."""
        folder = version_folder(Path(os.environ[ENV_ADAPTERS]), body["name"], body["version"])
        began = time.perf_counter()
        await self._adapters.serve(engine, state.openai_serving_models, body["name"], body["version"], str(folder))
        return {"pause_seconds": time.perf_counter() - began}

    async def _withdraw_adapters(self, state: Any, _: Any, body: dict[str, Any]) -> dict[str, Any]:
        self._adapters.withdraw(state.openai_serving_models, body["names"])
        return {}

    async def _sleepless(self, engine: Any, _: dict[str, Any]) -> dict[str, Any]:
        if engine.vllm_config.model_config.enable_sleep_mode:
            return {"reason": ""}
        return {
            "reason": "this engine was started without --enable-sleep-mode, which vLLM offers on GPUs alone; add it to the fleet's "
            "engine arguments"
        }

    async def _sleep(self, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        await engine.sleep(level=body["level"], mode="abort")
        return {}

    async def _wake(self, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        await engine.wake_up(tags=body["tags"])
        if WakeTag.WEIGHTS in body["tags"]:
            await self._adapters.forget_loaded(engine)
        return {}

    async def _set_door(self, _: Any, body: dict[str, Any]) -> dict[str, Any]:
        async with self._moved:
            self._door, self._version, self._reason = Door(body["door"]), body["version"], body["reason"]
            self._moved.notify_all()
        return {}


def _is_harmless(scope: Scope) -> bool:
    """Reads that show no token computed from weights; everything else, known or not, waits at the door."""
    return scope["method"] in {"GET", "HEAD"} and scope["path"] in _HARMLESS_PATHS


async def _body(receive: Receive) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        parts += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(parts)


async def _answer(
    send: Send, status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json"), *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
