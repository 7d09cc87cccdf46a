"""The pod's HTTP surface: probes for the kubelet, authenticated control calls for the sync job."""

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rolloutfleet.contract.authorization import carries_token
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import CALLS, Call, WorkerState
from rolloutfleet_worker.pod import EnginePod

_LARGEST_BODY = 256 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_application(
    pod: EnginePod, token: str, live: Callable[[], str], further: Iterable[web.RouteDef] = ()
) -> web.Application:
    """The application; ``live`` gives the reason why the engine counts as dead, or an empty string.

    ``further`` routes below the API's prefix take the token, too.
    """

    @web.middleware
    async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path.startswith(API_PREFIX):
                _authorize(request, token)
            return await handler(request)
        except ProblemError as error:
            return web.json_response(error.problem.model_dump(mode="json"), status=error.http_status)

    async def ready(_: web.Request) -> web.Response:
        return _probe(live() or pod.fence.unready_reason() or pod.fence.busy_reason())

    async def alive(_: web.Request) -> web.Response:
        return _probe(live())

    async def started(_: web.Request) -> web.Response:
        return _probe("" if pod.fence.state is not WorkerState.STARTING else pod.fence.message)

    async def report(_: web.Request) -> web.Response:
        return _json(pod.report())

    def verb(model: type[Call], act: Callable[[Any], Awaitable[BaseModel]]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            return _json(await act(await _parse(request, model)))

        return handle

    acts: dict[str, Callable[[Any], Awaitable[BaseModel]]] = {
        "admit": pod.admit,
        "check": pod.check,
        "join": pod.join,
        "prepare": pod.prepare,
        "pause": pod.pause,
        "receive": pod.receive,
        "commit": pod.commit,
        "resume": pod.resume,
        "abort": pod.abort,
        "reset-cache": pod.reset_cache,
        "sleep": pod.sleep,
        "wake": pod.wake,
        "lend": pod.lend,
        "let-go": pod.let_go,
        "borrow": pod.borrow,
    }
    application = web.Application(middlewares=[problems], client_max_size=_LARGEST_BODY)
    worker = f"{API_PREFIX}/worker"
    application.add_routes(
        [
            web.get("/healthz/live", alive),
            web.get("/healthz/ready", ready),
            web.get("/healthz/started", started),
            web.get(worker, report),
            *(web.post(f"{worker}/{route}", verb(model, acts[route])) for route, model in CALLS.items()),
            *further,
        ]
    )
    return application


def _authorize(request: web.Request, token: str) -> None:
    if not carries_token(request.headers.get("Authorization", ""), token):
        raise ProblemError(
            ProblemCode.UNAUTHORIZED,
            "the bearer token is missing or not this fleet's; it stands in the fleet's token Secret",
        )


async def _parse(request: web.Request, model: type[Call]) -> Call:
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in error.errors())
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{request.path}: {faults}") from error


def _json(message: BaseModel) -> web.Response:
    return web.Response(text=message.model_dump_json(by_alias=True), content_type="application/json")


def _probe(reason: str) -> web.Response:
    return web.Response(
        status=503 if reason else 200,
        text=json.dumps({"ok": not reason, "reason": reason}),
        content_type="application/json",
    )
