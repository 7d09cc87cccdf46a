"""The server's process: the fleet's middleware in front of an engine whose every step reads all weights once."""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import uvicorn  # type: ignore[import-not-found]
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rolloutfleet_worker.core_swap import CORE_SWAP
from rolloutfleet_worker.middleware import FleetMiddleware

STEP_SECONDS = 0.005
"""What a step takes beside reading the weights."""


class Core:
    """The scheduler: one step at a time on all ranks, none while it is paused, and calls to the ranks between two steps."""

    def __init__(self, ranks: int) -> None:
        self._turn = asyncio.Lock()
        self._running = asyncio.Event()
        self._running.set()
        self._pipes = [_start_rank(rank, ranks) for rank in range(ranks)]
        self._threads = ThreadPoolExecutor(max_workers=ranks)

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def ready(self) -> None:
        """Return when every rank is up."""
        await self._gather(lambda pipe: _answer(pipe))

    async def step(self) -> str:
        """The checksum of what every rank computed with in one step."""
        while True:
            await self._running.wait()
            async with self._turn:
                if self._running.is_set():
                    await asyncio.sleep(STEP_SECONDS)
                    return "-".join(await self._ask("step", {}))

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:  # noqa: ARG002 - vLLM's own signature
        self._running.clear()
        async with self._turn:
            return

    async def resume_scheduler_async(self) -> None:
        self._running.set()

    async def call_utility_all_async(
        self,
        method: str,
        version: int,
        reset_cache: bool,
        pause: bool,
        resume: bool,
    ) -> list[dict[str, Any]]:
        """The one call of its core that the middleware makes: a swap, as :mod:`rolloutfleet_worker.core_swap` makes it in vLLM."""
        if method != CORE_SWAP:
            raise AttributeError(f"this core has no method {method}")
        if pause:
            self._running.clear()
        async with self._turn:
            began = time.perf_counter()
            await self._ask("start_weight_update", {})
            await self._ask("update_weights", {"update_info": {"version": version}})
            await self._ask("finish_weight_update", {})
        if resume:
            self._running.set()
        return [{"reset": True if reset_cache else None, "pause_seconds": time.perf_counter() - began}]

    async def _ask(self, act: str, arguments: dict[str, Any]) -> list[Any]:
        def ask(pipe: Connection) -> Any:
            pipe.send((act, arguments))
            return _answer(pipe)

        return await self._gather(ask)

    async def _gather(self, work: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        try:
            return list(
                await asyncio.gather(*(loop.run_in_executor(self._threads, work, pipe) for pipe in self._pipes))
            )
        except (EOFError, ConnectionError):
            # As vLLM does when its core has died: the server ends, and the launcher with it.
            os._exit(1)


class EngineClient:
    """What the middleware needs of vLLM's engine client."""

    def __init__(self, core: Core) -> None:
        self.engine_core = core
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    async def check_health(self) -> None:
        return

    async def is_paused(self) -> bool:
        return self.engine_core.paused

    async def resume_generation(self) -> None:
        await self.engine_core.resume_scheduler_async()

    async def reset_prefix_cache(self, **_: bool) -> bool:
        return True

    async def reset_encoder_cache(self) -> None:
        return


def _start_rank(rank: int, ranks: int) -> Connection:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "vllm.rank", str(theirs.fileno()), str(rank), str(ranks)]
    subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def _answer(pipe: Connection) -> Any:
    error, answer = pipe.recv()
    if error:
        raise RuntimeError(error)
    return answer


async def _serve(port: int, host: str, ranks: int) -> None:
    core = Core(ranks)
    await core.ready()

    async def complete(_: Request) -> Response:
        return JSONResponse({"checksum": await core.step()})

    app = Starlette(
        routes=[Route("/v1/completions", complete, methods=["POST"])], middleware=[Middleware(FleetMiddleware)]
    )
    app.state.engine_client = EngineClient(core)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False))
    await server.serve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    options, _ = parser.parse_known_args()
    asyncio.run(_serve(options.port, options.host, options.tensor_parallel_size))


if __name__ == "__main__":
    main()
