"""The sync job dies, is stopped, or loses its store: what its successor makes of what it finds."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer
from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.trainer import Phase, RefitView
from rolloutfleet.contract.worker import WorkerState


async def transfer(fleet: Fleet, trainer: FakeTrainer, version: int) -> RefitView:
    """A refit up to the moment when every engine receives and nothing has been sent."""
    for worker in fleet.workers:
        worker.event("receive").clear()
    view = await trainer.follow(await trainer.request(version), until=lambda v: v.send is not None)
    async with asyncio.timeout(5):
        for worker in fleet.workers:
            await worker.event("receive").wait()
    return view


async def test_a_successor_aborts_what_every_member_holds_whole_but_nobody_has_verified(
    fleet: Fleet, trainer: FakeTrainer, http: aiohttp.ClientSession
):
    await trainer.open()
    view = await transfer(fleet, trainer, 3)
    await fleet.kill_sync()
    fleet.wire.send(view.epoch, 3, "bytes-3")
    await fleet.wire.until(lambda: all(worker.engine.fence.state is WorkerState.RECEIVED for worker in fleet.workers))
    assert fleet.store.document["intent"] == {"epoch": view.epoch, "version": 3}
    await fleet.start_sync()
    await fleet.wire.until(lambda: all(worker.engine.fence.state is WorkerState.DIRTY for worker in fleet.workers))
    assert fleet.store.document["version"] == 0
    trainer.url = fleet.url
    with pytest.raises(ProblemError) as lost:
        await trainer.call("POST", f"sessions/{trainer.session}/renew")
    assert lost.value.code is ProblemCode.SESSION_LOST
    await trainer.open()
    assert (await trainer.refit(3)).phase is Phase.COMPLETE
    assert all(worker.engine.serves and worker.engine.weights == (3, "bytes-3") for worker in fleet.workers)


@pytest.mark.scenario("F45")
async def test_a_successor_aborts_what_one_member_does_not_hold(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(2)).phase is Phase.COMPLETE
    view = await transfer(fleet, trainer, 3)
    await fleet.kill_sync()
    await fleet.workers[1].restart()
    fleet.wire.send(view.epoch, 3, "bytes-3")
    await fleet.start_sync()
    await fleet.until(lambda state: state.version == 2)
    await fleet.wire.until(lambda: fleet.workers[0].engine.fence.state is WorkerState.DIRTY)
    assert fleet.store.document["version"] == 2
    trainer.url = fleet.url
    await trainer.open()
    view = await trainer.refit(3)
    assert view.phase is Phase.COMPLETE
    assert all(worker.engine.serves and worker.engine.weights == (3, "bytes-3") for worker in fleet.workers)


async def test_a_successor_finishes_a_commit_that_was_written(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    for worker in fleet.workers:
        worker.hangs.add("commit")
    fleet.workers[1].refuses["commit"] = ProblemError(ProblemCode.ENGINE_FAILED, "not now")
    view = await transfer(fleet, trainer, 3)
    await trainer.sent(view)
    async with asyncio.timeout(5):
        await fleet.workers[0].event("commit").wait()
        await fleet.workers[1].event("commit").wait()
    await fleet.kill_sync()
    for worker in fleet.workers:
        worker.hangs.clear()
        worker.refuses.clear()
    assert [worker.engine.fence.state for worker in fleet.workers] == [WorkerState.PAUSED, WorkerState.RECEIVED]
    await fleet.start_sync()
    await fleet.until_admitted()
    assert all(worker.engine.weights == (3, "bytes-3") for worker in fleet.workers)


@pytest.mark.scenario("F66")
async def test_engines_left_paused_by_a_dead_sync_job_generate_again(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    assert (await trainer.refit(1)).phase is Phase.COMPLETE
    fleet.workers[0].hangs.add("pause")
    view = await trainer.request(2)
    await trainer.follow(view, until=lambda v: v.waiting_for == ("f-0-0-0",))
    await fleet.kill_sync()
    fleet.workers[0].hangs.clear()
    assert all(worker.engine.fence.state is WorkerState.PAUSED for worker in fleet.workers)
    await fleet.start_sync()
    await fleet.until_admitted()
    assert all(worker.engine.weights == (1, "bytes-1") for worker in fleet.workers)


async def test_a_commit_whose_answer_is_lost_is_read_back_and_followed(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    fleet.store.lose_commit_answers = 1
    view = await trainer.refit(1)
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.message.startswith("nobody knows whether version 1 is committed")
    await fleet.until_admitted()
    assert (await trainer.fleet()).version == 1
    assert (await trainer.refit(2)).phase is Phase.COMPLETE


async def test_an_intent_that_cannot_be_written_pauses_nobody(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    fleet.store.down = True
    view = await trainer.refit(1)
    assert view.phase is Phase.FAILED
    assert view.problem is not None
    assert view.problem.message == "the intent could not be written to the status: the API server does not answer"
    assert all("pause" not in worker.verbs and worker.engine.serves for worker in fleet.workers)
    fleet.store.down = False
    assert (await trainer.refit(1)).phase is Phase.COMPLETE


async def test_a_stop_before_the_transfer_aborts_and_leaves_everybody_serving(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await trainer.follow(await trainer.request(1), until=lambda v: v.join is not None)
    await fleet.stop_sync()
    assert all(worker.verbs[-1] == "abort" and worker.engine.serves for worker in fleet.workers)
    assert fleet.store.document["lastRefit"]["message"] == "the sync job is stopping"
    assert fleet.store.document["lastRefit"]["epoch"] == view.epoch


async def test_a_stop_during_the_transfer_leaves_the_intent_to_the_successor(fleet: Fleet, trainer: FakeTrainer):
    await trainer.open()
    view = await transfer(fleet, trainer, 1)
    await fleet.stop_sync()
    assert fleet.store.document["intent"]["version"] == 1
    fleet.wire.send(view.epoch, 1, "bytes-1")
    await fleet.start_sync()
    await fleet.wire.until(lambda: all(worker.engine.fence.state is WorkerState.DIRTY for worker in fleet.workers))
    assert fleet.store.document["version"] == 0


class Process:
    """The sync job as a process of its own, over files."""

    def __init__(self, folder: Path, fleet: Fleet):
        self._folder = folder
        (folder / "roster.json").write_text(fleet.make_roster().model_dump_json(by_alias=True))
        (folder / "token").write_text(f"{fleet.token}\n")
        self.status = folder / "status.json"

    async def start(self) -> str:
        """Start it and return its address."""
        arguments = [
            "-m",
            "rolloutfleet_sync",
            "--roster",
            "roster.json",
            "--status",
            "status.json",
            "--token-file",
            "token",
            "--model",
            "m",
        ]
        arguments += ["--host", "127.0.0.1", "--port", "0"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=self._folder, env=environment, stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            entry = json.loads(line)
            assert entry["fleet"] == "f"
            if entry["message"] == "listening":
                self._drain = asyncio.ensure_future(self._process.stderr.read())
                return f"http://127.0.0.1:{entry['addresses'][0][1]}"
        raise AssertionError("the sync job ended before it listened")

    async def end(self, number: int) -> int:
        self._process.send_signal(number)
        status = await self._process.wait()
        await self._drain
        return status


async def open_when_ready(trainer: FakeTrainer) -> None:
    """A session with a sync job that may not have read its files yet."""
    while True:
        try:
            await trainer.open()
        except ProblemError as error:
            assert error.code is ProblemCode.WRONG_STATE  # noqa: PT017
            await asyncio.sleep(0.02)
        else:
            return


async def test_one_person_with_one_machine_runs_it_over_files(
    tmp_path: Path, start_fleet: Any, http: aiohttp.ClientSession
):
    fleet = await start_fleet()
    await fleet.stop_sync()
    process = Process(tmp_path, fleet)
    trainer = FakeTrainer(http, await process.start(), fleet.wire)
    async with asyncio.timeout(8):
        await open_when_ready(trainer)
        assert (await trainer.refit(1)).phase is Phase.COMPLETE
        view = await transfer(fleet, trainer, 2)
        assert await process.end(signal.SIGKILL) == -signal.SIGKILL
        assert json.loads(process.status.read_text())["intent"]["version"] == 2
        fleet.wire.send(view.epoch, 2, "bytes-2")
        trainer.url = await process.start()
        await open_when_ready(trainer)
        assert (await trainer.refit(2)).phase is Phase.COMPLETE
        assert all(worker.engine.serves and worker.engine.weights == (2, "bytes-2") for worker in fleet.workers)
    assert await process.end(signal.SIGTERM) == 0
    stored = json.loads(process.status.read_text())
    assert stored["version"] == 2
    assert "intent" not in stored
