"""A fake trainer: raw HTTP against the sync job, and a digest where weights would be."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import aiohttp

from fakes.worker import Wire
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.problems import Problem, ProblemError
from rolloutfleet.contract.trainer import FleetView, OpenSession, Phase, RefitView, SessionView, TrainerSent
from rolloutfleet.contract.worker import Rendezvous

MANIFEST = Manifest(
    tensors=(TensorSpec(name="a", dtype="float32", shape=(4, 2)), TensorSpec(name="b", dtype="bfloat16", shape=(3,)))
)


class FakeTrainer:
    """One trainer; ``tell_digest`` lets it lie about what it sent."""

    def __init__(self, http: aiohttp.ClientSession, url: str, wire: Wire, token: str = "secret", name: str = "t1"):
        self.name = name
        self.session = ""
        self.layouts: tuple[str, ...] = ()
        """Digests of the workers' layouts, once a refit has been prepared."""
        self.url = url
        self._http = http
        self._wire = wire
        self._headers = {"Authorization": f"Bearer {token}"}

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The answer's JSON; raises ProblemError for what the sync job refuses."""
        text = body if isinstance(body, str) else body.model_dump_json(by_alias=True) if body is not None else ""
        url = f"{self.url}{API_PREFIX}/{path}"
        async with self._http.request(
            method, url, data=io.BytesIO(text.encode()), params=query, headers=self._headers
        ) as response:
            content = await response.read()
            if response.status >= 400:
                raise ProblemError.of(Problem.model_validate_json(content))
            return content

    async def fleet(self) -> FleetView:
        return FleetView.model_validate_json(await self.call("GET", "fleet"))

    async def open(self, **fields: Any) -> SessionView:
        values = {"trainer": self.name, "rendezvous": Rendezvous(host="127.0.0.1", port=29500)} | fields
        view = SessionView.model_validate_json(await self.call("POST", "sessions", OpenSession(**values)))
        self.session = view.session
        return view

    async def request(self, version: int, manifest: Manifest = MANIFEST) -> RefitView:
        body = f'{{"version": {version}, "manifest": {manifest.model_dump_json()}}}'
        return RefitView.model_validate_json(await self.call("POST", f"sessions/{self.session}/refits", body))

    async def poll(self, refit: str, after: int = 0, wait: float = 10.0) -> RefitView:
        return RefitView.model_validate_json(await self.call("GET", f"refits/{refit}", after=after, wait=wait))

    async def wait_for(self, refit: str, *phases: Phase) -> RefitView:
        """The first view in one of these phases; the trainer does nothing meanwhile."""
        view = await self.poll(refit, wait=0)
        while view.phase not in phases:
            view = await self.poll(refit, after=view.sequence)
        return view

    async def joined(self, view: RefitView) -> RefitView:
        body = f'{{"epoch": {view.epoch}}}'
        return RefitView.model_validate_json(await self.call("POST", f"refits/{view.refit}/joined", body))

    async def prepared(self, view: RefitView) -> RefitView:
        assert view.prepare is not None
        self.layouts = view.prepare.layouts
        body = f'{{"epoch": {view.epoch}}}'
        return RefitView.model_validate_json(await self.call("POST", f"refits/{view.refit}/prepared", body))

    async def sent(self, view: RefitView, digest: str | None = None, manifest: Manifest = MANIFEST) -> RefitView:
        """Send over the wire, then say what was sent; ``digest`` is a lie about it."""
        true = f"bytes-{view.version}"
        self._wire.send(view.epoch, view.version, true)
        digests = dict.fromkeys(self.layouts or ("",), digest or true)
        message = TrainerSent(epoch=view.epoch, tensors=len(manifest.tensors), nbytes=manifest.nbytes, digests=digests)
        body = message.model_dump_json(by_alias=True)
        return RefitView.model_validate_json(await self.call("POST", f"refits/{view.refit}/sent", body))

    async def follow(
        self, view: RefitView, *, until: Callable[[RefitView], bool] = lambda _: False, digest: str | None = None
    ) -> RefitView:
        """Do what the refit's views ask for until it ends or ``until`` says so."""
        done: set[tuple[str, int]] = set()
        while view.phase not in {Phase.COMPLETE, Phase.FAILED} and not until(view):
            try:
                if view.join is not None and ("join", view.epoch) not in done:
                    done.add(("join", view.epoch))
                    view = await self.joined(view)
                elif view.prepare is not None and ("prepare", view.epoch) not in done:
                    done.add(("prepare", view.epoch))
                    view = await self.prepared(view)
                elif view.send is not None and ("send", view.epoch) not in done:
                    done.add(("send", view.epoch))
                    view = await self.sent(view, digest)
                else:
                    view = await self.poll(view.refit, after=view.sequence)
            except ProblemError:
                epoch, view = view.epoch, await self.poll(view.refit, wait=0)
                if view.problem is None and view.epoch == epoch:
                    raise
        return view

    async def refit(self, version: int) -> RefitView:
        """A whole refit; its last view."""
        async with asyncio.timeout(10):
            return await self.follow(await self.request(version))
