"""The sync job's HTTP surface for trainers: JSON in, JSON out, the fleet's bearer token on every route but those for probes and metrics."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rolloutfleet.contract.adapter import manifest_key
from rolloutfleet.contract.authorization import carries_token
from rolloutfleet.contract.history import RefitHistory
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.problems import Problem, ProblemCode, ProblemError
from rolloutfleet.contract.trainer import (
    OpenSession,
    RequestRefit,
    SleepFleet,
    TrainerFailed,
    TrainerJoined,
    TrainerPrepared,
    TrainerSent,
    WakeFleet,
)
from rolloutfleet_sync.protocol import events, summary, view
from rolloutfleet_sync.protocol.model import State
from rolloutfleet_sync.protocol.sessions import find_refit, find_running
from rolloutfleet_sync.runtime import Runtime

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A manifest of 20,000 tensors takes about 3 MB."""
LONGEST_WAIT_SECONDS = 30.0

OPEN_PATHS = ("/healthz", "/metrics")
"""Answered without a token: they hold no secrets, and kubelets and Prometheus have none."""

RUNTIME = web.AppKey("runtime", Runtime)
TOKEN = web.AppKey("token", str)

Message = TypeVar("Message", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(runtime: Runtime, token: str) -> web.Application:
    """The application; routes are those of :mod:`rolloutfleet.contract.trainer`, ``/healthz`` and ``/metrics``."""
    app = web.Application(middlewares=[_answer_problems, _require_token], client_max_size=MAX_BODY_BYTES)
    app[RUNTIME] = runtime
    app[TOKEN] = token
    app.router.add_get("/healthz", _live)
    app.router.add_get("/healthz/live", _live)
    app.router.add_get("/healthz/ready", _ready)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get(f"{API_PREFIX}/fleet", _fleet)
    app.router.add_get(f"{API_PREFIX}/history", _history)
    app.router.add_post(f"{API_PREFIX}/sessions", _open_session)
    app.router.add_post(f"{API_PREFIX}/sessions/{{session}}/renew", _renew_session)
    app.router.add_delete(f"{API_PREFIX}/sessions/{{session}}", _close_session)
    app.router.add_post(f"{API_PREFIX}/sessions/{{session}}/refits", _request_refit)
    app.router.add_get(f"{API_PREFIX}/refits/{{refit}}", _refit)
    app.router.add_post(f"{API_PREFIX}/refits/{{refit}}/joined", _joined)
    app.router.add_post(f"{API_PREFIX}/refits/{{refit}}/prepared", _prepared)
    app.router.add_post(f"{API_PREFIX}/refits/{{refit}}/sent", _sent)
    app.router.add_post(f"{API_PREFIX}/refits/{{refit}}/failed", _failed)
    app.router.add_post(f"{API_PREFIX}/cache/reset", _reset_cache)
    app.router.add_post(f"{API_PREFIX}/sleep", _sleep)
    app.router.add_post(f"{API_PREFIX}/wake", _wake)
    app.router.add_post(f"{API_PREFIX}/release", _release)
    return app


@web.middleware
async def _answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ProblemError as error:
        return _problem(error.problem, error.http_status)
    except ValidationError as error:
        problem = Problem(code=ProblemCode.INVALID_REQUEST, message=describe_invalid(error))
        return _problem(problem, 422)
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is larger than {MAX_BODY_BYTES} bytes"
        return _problem(Problem(code=ProblemCode.INVALID_REQUEST, message=message), 413)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}; routes are below {API_PREFIX}"
        code = ProblemCode.NOT_FOUND if error.status == 404 else ProblemCode.INVALID_REQUEST
        return _problem(Problem(code=code, message=message), error.status)


@web.middleware
async def _require_token(request: web.Request, handler: Handler) -> web.StreamResponse:
    authorization = request.headers.get("Authorization", "")
    if not request.path.startswith(OPEN_PATHS) and not carries_token(authorization, request.app[TOKEN]):
        raise ProblemError(
            ProblemCode.UNAUTHORIZED,
            "the bearer token is missing or is not this fleet's; it is in the fleet's token Secret",
        )
    return await handler(request)


def describe_invalid(error: ValidationError) -> str:
    """Every fault of a message in one line: field, value and rule."""
    faults = []
    for fault in error.errors()[:8]:
        field = ".".join(str(part) for part in fault["loc"]) or "body"
        value = repr(fault["input"])
        shown = value if len(value) <= 100 else f"{value[:100]}..."
        faults.append(f"{field}: {shown}: {fault['msg']}")
    more = f"; and {error.error_count() - 8} more" if error.error_count() > 8 else ""
    return "; ".join(faults) + more


def _problem(problem: Problem, status: int) -> web.Response:
    return web.json_response(text=problem.model_dump_json(), status=status)


def _answer(message: BaseModel) -> web.Response:
    return web.json_response(text=message.model_dump_json(by_alias=True))


async def _read(request: web.Request, model: type[Message]) -> Message:
    return model.model_validate_json(await request.read() or b"{}")


async def _live(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _ready(request: web.Request) -> web.Response:
    readiness = summary.judge_readiness(request.app[RUNTIME].state)
    return web.Response(text=f"{readiness.reason}: {readiness.message}\n", status=200 if readiness.status else 503)


async def _metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[RUNTIME].metrics.render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _history(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    return _answer(RefitHistory(refits=tuple(summary.tell_history(runtime.state, runtime.clock.wall))))


async def _fleet(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    state = runtime.state
    told = {"progress": summary.show_progress(state, runtime.clock.wall), "gaps": tuple(summary.find_gaps(state))}
    return _answer(view.view_fleet(state).model_copy(update=told))


async def _open_session(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    message = await _read(request, OpenSession)
    session = runtime.new_id()
    runtime.apply(events.SessionOpened(session, message))
    return _answer(view.view_session(runtime.state, session))


async def _renew_session(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    session = request.match_info["session"]
    runtime.apply(events.SessionRenewed(session))
    return _answer(view.view_session(runtime.state, session))


async def _close_session(request: web.Request) -> web.Response:
    request.app[RUNTIME].apply(events.SessionClosed(request.match_info["session"]))
    return web.Response(status=204)


async def _request_refit(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    session = request.match_info["session"]
    runtime.apply(events.SessionRenewed(session))
    message = await _read(request, RequestRefit)
    digest = manifest_key(message.manifest.digest(), message.adapter)
    running = find_running(runtime.state, session, message.version, digest)
    refit = running.id if running else runtime.new_id()
    runtime.apply(events.RefitRequested(refit, session, message, digest))
    return _answer(view.view_refit(runtime.state, refit, runtime.clock.now()))


async def _refit(request: web.Request) -> web.Response:
    """Long poll: answers as soon as the refit's sequence is above ``after``, or when ``wait`` is over."""
    runtime = request.app[RUNTIME]
    refit = request.match_info["refit"]
    after = _number(request, "after", 0)
    longest = min(LONGEST_WAIT_SECONDS, runtime.state.timing.lease / 3)
    until = runtime.clock.now() + min(max(_number(request, "wait", 0), 0), longest)
    _renew_for(runtime, refit)
    while True:
        shown = view.view_refit(runtime.state, refit, runtime.clock.now())
        if shown.sequence > after or runtime.clock.now() >= until:
            return _answer(shown)
        await runtime.wait_for_change(until)


def _number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name, "")
    try:
        return float(text) if text else default
    except ValueError as error:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"{name}: {text!r}: is not a number") from error


def _renew_for(runtime: Runtime, refit: str) -> None:
    """Renew the session of a refit if it still is the one that holds the fleet."""
    session = find_refit(runtime.state, refit).session
    if runtime.state.session is not None and runtime.state.session.id == session:
        runtime.apply(events.SessionRenewed(session))


async def _joined(request: web.Request) -> web.Response:
    message = await _read(request, TrainerJoined)
    return _step_refit(request, events.TrainerHasJoined(request.match_info["refit"], message))


async def _prepared(request: web.Request) -> web.Response:
    message = await _read(request, TrainerPrepared)
    return _step_refit(request, events.TrainerHasPrepared(request.match_info["refit"], message))


async def _sent(request: web.Request) -> web.Response:
    message = await _read(request, TrainerSent)
    return _step_refit(request, events.TrainerHasSent(request.match_info["refit"], message))


async def _failed(request: web.Request) -> web.Response:
    message = await _read(request, TrainerFailed)
    return _step_refit(request, events.TrainerHasFailed(request.match_info["refit"], message))


def _step_refit(request: web.Request, event: events.Event) -> web.Response:
    runtime = request.app[RUNTIME]
    refit = request.match_info["refit"]
    _renew_for(runtime, refit)
    runtime.apply(event)
    return _answer(view.view_refit(runtime.state, refit, runtime.clock.now()))


async def _release(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    runtime.apply(events.HoldReleased())
    return _answer(view.view_fleet(runtime.state))


async def _reset_cache(request: web.Request) -> web.Response:
    round_id = request.app[RUNTIME].new_id()
    return await _go_round(request, events.CacheResetRequested(round_id), round_id, view.view_cache_reset)


async def _sleep(request: web.Request) -> web.Response:
    message = await _read(request, SleepFleet)
    round_id = request.app[RUNTIME].new_id()
    return await _go_round(request, events.SleepRequested(round_id, message), round_id, view.view_rest)


async def _wake(request: web.Request) -> web.Response:
    message = await _read(request, WakeFleet)
    round_id = request.app[RUNTIME].new_id()
    return await _go_round(request, events.WakeRequested(round_id, message), round_id, view.view_rest)


async def _go_round(
    request: web.Request, event: events.Event, round_id: str, show: Callable[[State, str], BaseModel | None]
) -> web.Response:
    """Ask every engine, and answer when all have."""
    runtime = request.app[RUNTIME]
    runtime.apply(event)
    try:
        while (shown := show(runtime.state, round_id)) is None:
            await runtime.wait_for_change(float("inf"))
    finally:
        runtime.apply(events.RoundShown(round_id))
    return _answer(shown)
