"""A fake launcher: the worker's control surface over HTTP in front of a :class:`~fakes.engine.FakeEngine`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import BaseModel

from fakes.engine import FakeEngine
from rolloutfleet.contract.members import Member
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import CALLS, Receive


class Wire:
    """Where a fake trainer's bytes meet the fake workers: one digest for each epoch and version."""

    def __init__(self):
        self._sent: dict[tuple[int, int], asyncio.Future[str]] = {}
        self._acted = asyncio.Event()

    def note_act(self) -> None:
        """An engine has changed."""
        self._acted.set()
        self._acted = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the engines satisfy the condition."""
        async with asyncio.timeout(8):
            while not condition():
                await self._acted.wait()

    def future(self, epoch: int, version: int) -> "asyncio.Future[str]":
        return self._sent.setdefault((epoch, version), asyncio.get_running_loop().create_future())

    def send(self, epoch: int, version: int, digest: str) -> None:
        if not self.future(epoch, version).done():
            self.future(epoch, version).set_result(digest)

    def cut(self, message: str) -> None:
        """Every transfer under way ends for everybody who takes part."""
        for future in self._sent.values():
            if not future.done():
                future.set_exception(ConnectionResetError(message))
                future.exception()


@dataclass
class FakeWorker:
    """One launcher on a port of its own, with failures to order."""

    engine: FakeEngine
    wire: Wire
    token: str = "secret"
    port: int = 0
    refuses: dict[str, ProblemError] = field(default_factory=dict)
    """Verbs that answer this problem instead of acting."""
    hangs: set[str] = field(default_factory=set)
    """Verbs that act and never answer."""
    verbs: list[str] = field(default_factory=list)
    """Every verb that came in, in order."""
    arrived: dict[str, asyncio.Event] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def member(self) -> Member:
        return self.engine.member

    async def start(self) -> "FakeWorker":
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get(f"{API_PREFIX}/worker", self._report)
        app.router.add_post(f"{API_PREFIX}/worker/{{verb}}", self._call)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.engine.member = self.engine.member.model_copy(update={"address": f"127.0.0.1:{self.port}"})
        return self

    async def kill(self) -> None:
        """End as a killed process does: connections break, nothing answers any more, peers lose the transfer."""
        await self._runner.cleanup()
        self.wire.cut(f"connection closed by {self.name}")

    async def restart(self) -> None:
        """The container comes back in place: same pod, same port, another process with the weights of its start."""
        await self._runner.cleanup()
        self.hangs.clear()
        self.engine = FakeEngine(
            self.engine.member,
            instance=f"{self.engine.instance}+",
            environment=self.engine.environment,
            device=self.engine.device,
            locality=self.engine.locality,
        )
        await self.start()

    def event(self, verb: str) -> asyncio.Event:
        """Set once a call of this verb has come in."""
        return self.arrived.setdefault(verb, asyncio.Event())

    async def _report(self, request: web.Request) -> web.Response:
        return self._authorized(request) or _answer(self.engine.report())

    def _authorized(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") == f"Bearer {self.token}":
            return None
        return _problem(ProblemError(ProblemCode.UNAUTHORIZED, "wrong token"))

    async def _call(self, request: web.Request) -> web.Response:
        refusal = self._authorized(request)
        if refusal is not None:
            return refusal
        verb = request.match_info["verb"]
        message = CALLS[verb].model_validate_json(await request.read())
        self.verbs.append(verb)
        self.event(verb).set()
        try:
            if verb in self.refuses:
                raise self.refuses[verb]
            answer = await (self._receive(message) if isinstance(message, Receive) else self.engine.handle(message))
        except ProblemError as error:
            return _problem(error)
        finally:
            self.wire.note_act()
        if verb in self.hangs:
            await asyncio.Event().wait()
        return _answer(answer)

    async def _receive(self, call: Receive) -> BaseModel:
        engine = self.engine
        answer = asyncio.ensure_future(engine.handle(call))
        self.wire.future(call.epoch, call.version).add_done_callback(lambda sent: self._arrived(engine, sent))
        return await answer

    def _arrived(self, engine: FakeEngine, sent: "asyncio.Future[str]") -> None:
        error = sent.exception()
        if error is None:
            engine.arrive(sent.result())
        else:
            engine.break_transfer(str(error))


def _answer(message: BaseModel) -> web.Response:
    return web.json_response(text=message.model_dump_json(by_alias=True))


def _problem(error: ProblemError) -> web.Response:
    return web.json_response(text=error.problem.model_dump_json(), status=error.http_status)
