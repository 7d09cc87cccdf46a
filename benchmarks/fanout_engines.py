"""Engines that hold no weights, many in one process, each behind an HTTP server of its own: ``python -m benchmarks.fanout_engines``.

They answer the sync job's calls, at once or after a time that stands for work, and keep what its protocol asks of them: epoch, version and
whether they stand still. A call with the header ``x-bare`` is answered alike and changes nothing: it is the floor that the sync job is
compared with.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel

from rolloutfleet.contract.manifest import ManifestFaults
from rolloutfleet.contract.names import API_PREFIX
from rolloutfleet.contract.worker import (
    CALLS,
    Abort,
    Admit,
    Call,
    Check,
    CheckReport,
    Commit,
    CommitReport,
    Join,
    JoinReport,
    Pause,
    Receive,
    ReceiveReport,
    Resume,
    WorkerReport,
    WorkerState,
)

DIGEST = "0" * 64
"""Of nothing, on both sides."""
BARE = "x-bare"


class Engine:
    """One engine of no weights."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"measured-{number}-0-0"
        self.state = WorkerState.SERVING
        self.epoch = 0
        self.version = 0
        self.in_flight = 0
        self.admitted: int | None = None

    def report(self) -> WorkerReport:
        return WorkerReport(
            fleet_uid="fleet-uid",
            pod_name=self.name,
            pod_uid=f"pod-{self.number}",
            instance=f"instance-{self.number}",
            engine=self.number,
            ranks=1,
            state=self.state,
            epoch=self.epoch,
            version=self.version,
            version_in_flight=self.in_flight,
            admitted=self.admitted,
            vllm_version="0.32.0",
            devices=("cpu",),
        )

    def act(self, call: Call) -> BaseModel:
        """Do what is asked and answer it."""
        self.epoch = max(self.epoch, call.epoch)
        match call:
            case Admit():
                self.admitted = call.version
            case Pause():
                self.state = WorkerState.PAUSED
            case Receive():
                self.state, self.in_flight = WorkerState.RECEIVED, call.version
            case Commit():
                self.version = self.admitted = call.version
                self.state, self.in_flight = WorkerState.PAUSED, 0
            case Resume() | Abort():
                self.state = WorkerState.SERVING
        return self.answer(call)

    def answer(self, call: Call) -> BaseModel:
        """The answer alone."""
        match call:
            case Check():
                return CheckReport(faults=ManifestFaults())
            case Join():
                return JoinReport(ranks=(call.rank_offset,))
            case Receive():
                return ReceiveReport(
                    version=call.version,
                    tensors=1,
                    nbytes=0,
                    received_digests=(DIGEST,),
                    live_digests=(DIGEST,),
                    receive_seconds=0.0,
                    load_seconds=0.0,
                )
            case Commit():
                return CommitReport(version=call.version, cache_reset=True)
        return self.report()


def build_app(engine: Engine, work_seconds: float) -> web.Application:
    """The control surface of one engine, which takes this long for each call."""

    async def report(_: web.Request) -> web.Response:
        return _json(engine.report())

    async def call(request: web.Request) -> web.Response:
        message = CALLS[request.match_info["verb"]].model_validate_json(await request.read())
        if work_seconds:
            await asyncio.sleep(work_seconds)
        return _json(engine.answer(message) if BARE in request.headers else engine.act(message))

    app = web.Application()
    app.router.add_get(f"{API_PREFIX}/worker", report)
    app.router.add_post(f"{API_PREFIX}/worker/{{verb}}", call)
    return app


def _json(message: BaseModel) -> web.Response:
    return web.json_response(text=message.model_dump_json(by_alias=True))


async def serve(numbers: range, ports_file: Path, work_seconds: float) -> None:
    """Serve these engines until the process is ended; their ports are written into the file, by number."""
    ports = {}
    for number in numbers:
        runner = web.AppRunner(build_app(Engine(number), work_seconds), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=16).start()
        ports[number] = runner.addresses[0][1]
    fresh = ports_file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(ports))
    fresh.replace(ports_file)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(range(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3]), float(sys.argv[4])))
