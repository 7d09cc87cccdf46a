"""What it costs to pause, refit and resume many engines at once when nothing has to travel: ``make bench-fanout``.

The sync job and the client are the real ones, each in its process; engines hold no weights and answer at once, each behind an HTTP server
of its own, many in a process. What is measured is the time from the first pause call to the last engine resumed: four fan-outs, the
trainer's part between them, the comparison of what everybody has, and the durable write. Beside it, in turn and in the same run: the same
calls of the same sizes made by nothing but aiohttp, all at once per fan-out (the floor) and one after another. A last part repeats the
largest fleet with engines that take 5 ms for each call, as real ones take some time.

``ENGINES=4,64`` and ``ROUNDS=3`` rehearse.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rolloutfleet
from benchmarks.bars import Bar, draw_bars
from benchmarks.fanout_engines import DIGEST
from benchmarks.processes import TOKEN, Program, free_ports
from benchmarks.record import RESULTS, ROOT, Record, median, say
from rolloutfleet import rank as trainer_rank
from rolloutfleet.contract.policy import CachePolicy, RefitPolicy, Staging, Transport
from rolloutfleet.contract.trainer import TrainerJoin, TrainerPrepare, TrainerSend
from rolloutfleet.delivery import Cargo, Seat, Sent

ENGINES = tuple(int(count) for count in os.environ.get("ENGINES", "4,64,256").split(","))
ROUNDS = int(os.environ.get("ROUNDS", "15"))
SEQUENTIAL_ROUNDS = 3
PROCESSES = 2
READY_SECONDS = 120.0
ALL = (4, 64, 256)
WORK_SECONDS = 0.005
"""Of each call, in a part of its own with the largest fleet: what an engine really does takes time, in which others can be asked."""


class NothingToSend:
    """The trainer's part in an epoch, without a group and without a byte."""

    def aim(self, cargo: Cargo) -> None:
        """Nothing."""

    def prepare(self, order: TrainerPrepare, cargo: Cargo, cancelled: threading.Event) -> None:
        """Nothing."""

    def send(self, order: TrainerSend, cargo: Cargo) -> Sent:
        del order, cargo
        return Sent(1, 0, {"": DIGEST})

    def end(self, reason: str) -> None:
        """Nothing."""


def join_nothing(order: TrainerJoin, seat: Seat, cancelled: threading.Event) -> NothingToSend:
    """Stands for :func:`rolloutfleet.delivery.join_epoch`."""
    del order, seat, cancelled
    return NothingToSend()


class Engines:
    """Fake engines in a few processes; each call takes them so long."""

    def __init__(self, folder: Path, count: int, work_seconds: float) -> None:
        self._count = count
        share = -(-count // PROCESSES)
        ranges = [(first, min(first + share, count)) for first in range(0, count, share)]
        self._files = [folder / f"ports-{first}.json" for first, _ in ranges]
        self.programs = [
            Program(
                folder / f"engines-{first}.log",
                ["-m", "benchmarks.fanout_engines", str(first), str(last), str(file), str(work_seconds)],
            )
            for (first, last), file in zip(ranges, self._files, strict=True)
        ]
        self.ports: list[int] = []

    def await_listening(self) -> None:
        """Return when every engine listens; their ports are known then."""
        await_that(lambda: all(file.exists() for file in self._files), "the engines listen")
        ports = {int(number): port for file in self._files for number, port in json.loads(file.read_text()).items()}
        self.ports = [ports[number] for number in range(self._count)]

    def roster(self) -> dict[str, Any]:
        members = [
            {
                "engine": n,
                "podName": f"measured-{n}-0-0",
                "podUid": f"pod-{n}",
                "address": f"127.0.0.1:{port}",
                "ranks": 1,
            }
            for n, port in enumerate(self.ports)
        ]
        return {"fleet": "measured", "fleetUid": "fleet-uid", "engines": len(members), "members": members}


def await_that(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; TimeoutError naming it otherwise."""
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {READY_SECONDS:g} s")
        time.sleep(0.05)


class Bare:
    """:mod:`benchmarks.fanout_bare` as a process."""

    def __init__(self, ports: Sequence[int]) -> None:
        paths = [str(ROOT / part) for part in ("client", "operator", "worker_image", ".")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fanout_bare", json.dumps(list(ports))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def measure(self, how: str) -> float:
        """Seconds of one round of all calls, ``at-once`` in each fan-out or ``in-turn``."""
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("both are pipes")
        self._process.stdin.write(f"{how}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(READY_SECONDS)


def measure(record: Record, folder: Path, count: int, work_seconds: float = 0.0) -> None:
    """All figures for so many engines."""
    folder.mkdir()
    engines = Engines(folder, count, work_seconds)
    programs: list[Program | Bare] = [*engines.programs]
    try:
        engines.await_listening()
        (folder / "roster.json").write_text(json.dumps(engines.roster()))
        (folder / "token").write_text(TOKEN)
        port, _ = free_ports()
        policy = RefitPolicy(transport=Transport.GLOO, staging=Staging.NEVER, cache=CachePolicy.RESET)
        files = [f"--roster={folder}/roster.json", f"--status={folder}/status.json", f"--token-file={folder}/token"]
        sync = Program(
            folder / "sync.log",
            [
                "-m",
                "rolloutfleet_sync",
                *files,
                f"--port={port}",
                "--model=measured",
                f"--policy={policy.model_dump_json(by_alias=True)}",
            ],
        )
        programs.append(sync)
        sync.await_answer(f"http://127.0.0.1:{port}/healthz/ready")
        fleet = rolloutfleet.connect(f"http://127.0.0.1:{port}", token=TOKEN)
        await_that(lambda: len(fleet.view().members) == count, "the fleet is known")
        await_that(lambda: all(member.ready for member in fleet.view().members), "every engine is admitted")
        bare = Bare(engines.ports)
        programs.append(bare)
        run_rounds(record, fleet, bare, count, work_seconds)
        fleet.close()
    finally:
        for program in reversed(programs):
            program.stop()


def run_rounds(record: Record, fleet: rolloutfleet.Fleet, bare: Bare, count: int, work_seconds: float) -> None:
    """Refits and bare fan-outs in turn, so that whatever else the machine does falls on both."""
    paused, wall, floors = [], [], []
    tensors = {"w": torch.empty(0)}
    fleet.refit(tensors, version=1)
    for version in range(2, ROUNDS + 2):
        floors.append(bare.measure("at-once"))
        began = time.perf_counter()
        result = fleet.refit(tensors, version=version)
        wall.append(time.perf_counter() - began)
        paused.append(result.pause_seconds)
        record.add(
            engines=count,
            work=work_seconds,
            pause=result.pause_seconds,
            refit=wall[-1],
            bare=floors[-1],
            seconds=dict(result.seconds),
        )
    sequential = [bare.measure("in-turn") for _ in range(SEQUENTIAL_ROUNDS)]
    record.add(engines=count, work=work_seconds, sequential=sequential)
    which = f"{count}_workers" + (f"_{work_seconds * 1e3:.0f}ms" if work_seconds else "")
    record.figure(f"seconds_{which}", median(paused))
    record.figure(f"refit_seconds_{which}", median(wall))
    record.figure(f"bare_seconds_{which}", median(floors))
    record.figure(f"times_bare_{which}", median(paused) / median(floors))
    record.figure(f"sequential_seconds_{which}", median(sequential))


def draw(figures: Mapping[str, float]) -> str:
    """The bars for the largest fleet that was measured."""
    count = max(ENGINES)
    words = (
        ("bare fan-outs, all at once", "bare_seconds", False),
        ("pause to resume", "seconds", True),
        ("calls one after another", "sequential_seconds", False),
    )
    work = f"{WORK_SECONDS * 1e3:.0f}"
    bars = [
        Bar(f"{label}{said}", figures[f"{name}_{count}_workers{suffix}"] * 1e3, ours=ours)
        for said, suffix in (("", ""), (f", {work} ms each", f"_{work}ms"))
        for label, name, ours in words
    ]
    return draw_bars(f"Pause to resume of {count} engines, nothing to send", "ms", bars)


def main() -> int:
    vars(trainer_rank)["join_epoch"] = join_nothing
    folder = RESULTS if ENGINES == ALL else Path(tempfile.mkdtemp(prefix="fanout-"))
    record = Record("fanout", ROOT / folder / "fanout.json")
    with tempfile.TemporaryDirectory(prefix="fanout-run-") as scratch:
        for count in ENGINES:
            with record.part(f"{count} engines"):
                measure(record, Path(scratch) / str(count), count)
        with record.part(f"{max(ENGINES)} engines that work"):
            measure(record, Path(scratch) / "work", max(ENGINES), WORK_SECONDS)
    if not record.failures:
        (ROOT / folder / "fanout.svg").write_text(draw(record.figures))
    say(f"results in {record.path}")
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
