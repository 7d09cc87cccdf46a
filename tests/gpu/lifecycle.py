"""A fleet of two small engines through what goes wrong: fifty refits, both kinds of sleep, a killed trainer, a killed engine.

Both engines and the trainer share one GPU, which NCCL takes only once, so weights go through memory there. By hand::

    PYTHONPATH=client:operator:worker_image:. python3 tests/gpu/lifecycle.py
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks import rivals
from benchmarks.floors import release
from benchmarks.processes import Engine, Fleet, Program, await_that, post
from benchmarks.record import TINY, Record, say
from benchmarks.refits import Measured, measured_refit, next_version
from benchmarks.shapes import dense, fill
from benchmarks.starting import engine_arguments, parser, run_folder

import rolloutfleet
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport
from rolloutfleet.contract.trainer import Phase, RefitView
from rolloutfleet.contract.worker import WorkerState

NAME = "lifecycle"
PARTS = ("flat", "trainer", "engine") if TINY else ("flat", "sleep", "trainer", "engine")
TRANSPORTS = (Transport.LAYOUT, Transport.COLOCATED) if TINY else (Transport.COLOCATED,)
LAYERS = 2
TOY_VOCABULARY = 60_000
"""Gives a dry run's transfers a length in which somebody can be killed."""
REFITS = 6 if TINY else 50
FLAT_BYTES = 64 << 20
FREED_SECONDS = 30.0 if TINY else 5.0
PROMPT = list(range(40, 72))
SETTLED = {WorkerState.SERVING, WorkerState.DIRTY}


class Lifecycle:
    """The fleet, and what each part does to it."""

    def __init__(self, record: Record, folder: Path, stack: ExitStack) -> None:
        self.record = record
        self.folder = folder
        self.shape = dense(LAYERS, toy_vocabulary=TOY_VOCABULARY)
        model = self.shape.write(folder / "model")
        # vLLM sleeps on GPUs alone.
        sleeping = [] if TINY else ["--enable-sleep-mode"]
        arguments = [*engine_arguments(self.shape, kv_cache_bytes=2 << 30), *sleeping]
        self.engines = [
            Engine(folder, model, arguments, engine=number, more={"NCCL_HOSTID": f"engine-{number}"})
            for number in range(2)
        ]
        for engine in self.engines:
            stack.callback(engine.stop)
        self.fleet = Fleet(folder, self.engines)
        stack.callback(self.fleet.stop_sync)
        self.weights = self.shape.weights(1)

    def flat(self) -> None:
        """Fifty refits, every second one from tensors that were allocated anew, leave memory as it was."""
        self._start(Transport.COLOCATED)
        with self.fleet.connect() as trainer:
            for round_ in range(REFITS + 4):
                if round_ == 4:
                    before = self._memory()
                if round_ % 2:
                    self.weights = {}
                    release()
                    self.weights = self.shape.weights(round_)
                self._refit(trainer, round_)
            after = self._memory()
        growth = {
            who: {kind: after[who][kind] - amount for kind, amount in memory.items()} for who, memory in before.items()
        }
        self.record.add(what=f"memory over {REFITS} refits", before=before, after=after, growth=growth)
        grown = max(max(-change["free"], change["allocated"], change["reserved"]) for change in growth.values())
        self.record.figure("grown_bytes", grown)
        if grown > FLAT_BYTES:
            raise AssertionError(f"{REFITS} refits took {grown} bytes: {growth}")

    def sleep(self) -> None:
        """Weights come back from level 1 as they were; after level 2 a refit between two wakes brings them."""
        self._start(Transport.COLOCATED)
        with self.fleet.connect() as trainer:
            for seed in (1, 2):
                self._refit(trainer, seed)
            spoken = self._tokens()
            self._call("sleep", {"level": 1})
            self._await_states({WorkerState.ASLEEP})
            self._call("wake", {"tags": []})
            if self._tokens() != spoken:
                raise AssertionError("after level 1 the engines say something else than before")
            self._refit(trainer, 3)
            spoken = self._tokens()
            self._call("sleep", {"level": 2})
            self._call("wake", {"tags": ["weights"]})
            self._refit(trainer, 3)
            self._call("wake", {"tags": ["kv_cache"]})
            if self._tokens() != spoken:
                raise AssertionError("after level 2 and a refit with the same weights the engines say something else")
            self._refit(trainer, 4)
        self.record.add(what="sleep", levels=[1, 2], right=True)

    def trainer(self) -> None:
        """A trainer that is killed in the middle of a transfer frees both engines, and the next trainer refits."""
        for transport in TRANSPORTS:
            self._start(transport)
            with self.fleet.connect() as before:
                version = next_version(before)
            dying = Program(
                self.folder / f"dying-{transport}.log",
                [
                    *("-m", "benchmarks.dying_trainer", "--address", self.fleet.address),
                    *("--layers", str(LAYERS), "--version", str(version)),
                    *("--toy-vocabulary", str(TOY_VOCABULARY)),
                    *("--after", "0"),
                ],
                {"NCCL_HOSTID": "trainer"},
            )
            if dying.process.wait(240) != -signal.SIGKILL:
                raise AssertionError(f"the trainer was to be killed in its second refit, but: {dying.tail()}")
            died = float(dying.tail().rpartition("dies ")[2])
            await_that("engines settle", lambda: {engine.report().state for engine in self.engines} <= SETTLED, 60.0)
            self._freed(f"trainer killed, {transport}", time.monotonic() - died)
            self._next_refit()

    def engine(self) -> None:
        """An engine that is killed in the middle of a transfer frees the trainer and its neighbour; the fleet goes on without it."""
        self._start(TRANSPORTS[0])
        lost = self.engines[1]
        with self.fleet.connect() as trainer:
            for seed in (1, 2):
                self._refit(trainer, seed)
            killed: list[float] = []
            core = lost.core()

            def kill() -> None:
                killed.append(time.monotonic())
                os.kill(core, signal.SIGKILL)

            def watch(view: RefitView) -> None:
                if view.phase is Phase.TRANSFERRING and not killed:
                    kill()

            fill(self.weights, 3)
            try:
                trainer.refit(self.weights, next_version(trainer), progress=watch, timeout=120.0)
            except rolloutfleet.RolloutFleetError as error:
                freed = time.monotonic() - killed[0]
                say(f"the refit failed after {freed:.2f} s: {error}")
            else:
                raise AssertionError("the refit ended well although an engine was killed in it")
            self._freed("engine killed: trainer", freed)
            await_that("the other settles", lambda: self.engines[0].report().state in SETTLED, 60.0)
            self._freed("engine killed: neighbour", time.monotonic() - killed[0])
        lost.stop()
        self.fleet.engines = self.engines = self.engines[:1]
        self.fleet.write_roster()
        self._next_refit()

    def _start(self, transport: Transport) -> None:
        self.fleet.start(RefitPolicy(transport=transport, staging=Staging.NEVER))

    def _refit(self, trainer: rolloutfleet.Fleet, seed: int) -> Measured:
        fill(self.weights, seed)
        return measured_refit(trainer, self.weights, next_version(trainer), 120.0)

    def _next_refit(self) -> None:
        # A killed trainer's lease has not ended yet.
        with self.fleet.connect(take_over=True) as trainer:
            refit = self._refit(trainer, 5)
        self._await_states({WorkerState.SERVING})
        said = self._tokens()
        if any(tokens != said[0] for tokens in said):
            raise AssertionError(f"after the next refit the engines disagree: {said}")
        self.record.add(**refit.as_run(what="the next refit"))

    def _freed(self, what: str, seconds: float) -> None:
        self.record.add(what=what, freed_seconds=seconds)
        say(f"{what}: free after {seconds:.2f} s")
        if seconds > FREED_SECONDS:
            raise AssertionError(f"{what}: free after {seconds:.1f} s, not within {FREED_SECONDS:g} s")

    def _await_states(self, states: set[WorkerState]) -> None:
        await_that(f"engines are {states}", lambda: {e.report().state for e in self.engines} <= states, 60.0)

    def _call(self, verb: str, body: dict[str, Any]) -> None:
        began = time.monotonic()
        post(f"{self.fleet.address}/rolloutfleet/v1/{verb}", body, 120.0)
        self.record.add(what=f"{verb} {body}", seconds=time.monotonic() - began)

    def _tokens(self) -> list[list[int]]:
        return [rivals.generate(engine.url, PROMPT, 12) for engine in self.engines]

    def _memory(self) -> dict[str, dict[str, int]]:
        memory = {engine.name: engine.call("benchmark_memory") for engine in self.engines}
        if not TINY:
            release()
            memory["trainer"] = {
                "free": torch.cuda.mem_get_info()[0],
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
            }
        return memory


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("--parts", default=",".join(PARTS))
    chosen = options.parse_args()
    os.environ["NCCL_HOSTID"] = "trainer"
    record = Record(NAME, chosen.output)
    with run_folder() as folder, ExitStack() as stack:
        life = Lifecycle(record, folder, stack)
        for part in chosen.parts.split(","):
            with record.part(part):
                getattr(life, part)()
            if part in record.failures:
                say(life.fleet.logs())
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
