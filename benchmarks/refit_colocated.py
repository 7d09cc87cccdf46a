"""Trainer and engine on one GPU: a refit beside the floor, beside vLLM's own ways, and beside serving.

For a dense 7B shape and a 30B mixture of experts cut to eight layers, all in one run:

* the floor: a flat copy of the same bytes;
* rivals: vLLM's ``ipc`` engine from this process, and its ``reload_weights``;
* ours from this process, through launcher, sync job and client (transport Colocated), with the data path apart from the whole refit;
* the pause (dense): weights lie in the host's memory and travel over the bus, which stands for a wire, while the engine decodes a steady
  load; the rank pins the memory that this process shows (transport Colocated).

``copy_seconds`` is the device's time for the rank's copies out of this process's memory, sums and all; ``receive_seconds`` the rank's own
for the whole order to receive; ``refit_seconds`` this process's for ``Fleet.refit``. The ratios to the floor are those of the copy, as the
floor is one. ``TINY=1`` runs all of it on CPUs with toy shapes, without the rivals that need a GPU.
"""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import rivals
from benchmarks.digests import switch_digests
from benchmarks.floors import flat_copy, from_pinned, host_digest, host_read, release
from benchmarks.load import Load
from benchmarks.processes import Engine, Fleet, StartError
from benchmarks.record import TINY, Record, median, say
from benchmarks.refits import Measured, measured_refit, next_version
from benchmarks.serving import summarize
from benchmarks.shapes import DEVICE, Shape, dense, experts
from benchmarks.starting import engine_arguments, parser, run_folder
from benchmarks.tracing import trace_refit
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport
from rolloutfleet.tiles.hostwork import host_threads

NAME = "refit_colocated"
SHAPES = {"dense": dense, "moe": experts}
PARTS = ("rivals", "ours", "pause", "trace")
STREAMS = 4 if TINY else 32
QUIET_SECONDS = 2.0 if TINY else 3.0
PAUSE_ROUNDS = 2 if TINY else 10
SETTLING_SECONDS = 1.0
HOST_ROUNDS = 3


class Measurement:
    """One shape's part of the benchmark."""

    def __init__(self, record: Record, shape: Shape, folder: Path, rounds: int) -> None:
        self.record = record
        self.shape = shape
        self.folder = folder
        self.rounds = rounds
        self.model = shape.write(folder / "model")
        self.prefix = "" if shape.name == "dense" else f"{shape.name}_"
        self.floor = 0.0
        self.ipc = 0.0

    def figure(self, name: str, value: float) -> None:
        self.record.figure(self.prefix + name, value)

    def keep(self, what: str, seconds: list[float]) -> None:
        self.record.add(shape=self.shape.name, what=what, seconds=seconds, nbytes=self.shape.nbytes)

    def measure_floor(self) -> None:
        seconds = flat_copy(self.shape.nbytes, DEVICE, self.rounds)
        release()
        self.keep("flat copy", seconds)
        self.floor = median(seconds)
        self.figure("floor_seconds", self.floor)

    def measure_rivals(self, stock: rivals.StockEngine, weights: Mapping[str, torch.Tensor]) -> None:
        if not TINY:
            both = {packed: rivals.send_ipc(stock, weights, self.rounds, packed=packed) for packed in (False, True)}
            for packed, seconds in both.items():
                self.keep(f"vLLM ipc, {'packed' if packed else 'unpacked'}", seconds)
            self.ipc = min(median(seconds) for seconds in both.values())
            self.figure("vllm_ipc_seconds", self.ipc)
        seconds = rivals.reload_weights(stock, weights, self.rounds)
        self.keep("vLLM reload_weights", seconds)
        self.figure("vllm_reload_seconds", median(seconds))

    def measure_ours(self, fleet: Fleet, weights: Mapping[str, torch.Tensor]) -> None:
        """Refits from this process, with digests and without: the copy on the device, the rank's own seconds, the whole."""
        engine = fleet.engines[0]
        fleet.start(RefitPolicy(transport=Transport.COLOCATED, staging=Staging.NEVER))
        with fleet.connect() as trainer:
            self._refit(trainer, weights, "first, through vLLM's loader")
            engine.call("benchmark_watch")
            self._refit(trainer, weights, "second, by layout")
            copied: dict[bool, float] = {}
            for on in (True, False):
                word = "on" if on else "off"
                try:
                    engine.call("benchmark_digests", word)
                    switch_digests(on=on)
                    self._refit(trainer, weights, f"warm up, digests {word}")
                    engine.call("benchmark_watch")
                    refits = [self._refit(trainer, weights, f"ours, digests {word}") for _ in range(self.rounds)]
                    watched = engine.call("benchmark_watch")
                finally:
                    switch_digests(on=True)
                    engine.call("benchmark_digests", "on")
                self.record.add(shape=self.shape.name, what=f"rank, digests {word}", **watched)
                received = median([report["receive_seconds"] for report in watched["reports"]])
                copied[on] = sum(table["seconds"] for table in watched["tables"]) / self.rounds or received
                self.figure(f"copy_seconds_digest_{word}", copied[on])
                self.figure(f"times_floor_digest_{word}", copied[on] / self.floor)
                self.figure(f"receive_seconds_digest_{word}", received)
                self.figure(f"refit_seconds_digest_{word}", median([refit.seconds for refit in refits]))
                self.figure(f"pause_seconds_digest_{word}", median([refit.result.pause_seconds for refit in refits]))
                if self.ipc and on:
                    whole = median([refit.seconds for refit in refits])
                    self.figure("times_faster_than_vllm_ipc", self.ipc / copied[on])
                    self.figure("whole_refit_times_faster_than_vllm_ipc", self.ipc / whole)

    def measure_host_digest(self) -> None:
        """The digest of tensors in the host's memory, which the trainer takes beside the engine, by one thread and by as many as it has."""
        nbytes = 64 << 20 if TINY else 2 << 30
        read = host_read(nbytes, HOST_ROUNDS)
        self.record.add(what="plain read of host memory, one thread", seconds=read, nbytes=nbytes)
        self.figure("host_read_gigabytes_per_second_a_thread", nbytes / median(read) / 1e9)
        for threads in sorted({1, host_threads()}):
            seconds = host_digest(nbytes, HOST_ROUNDS, threads)
            self.record.add(what=f"digest of host memory, {threads} threads", seconds=seconds, nbytes=nbytes)
            name = "a_thread" if threads == 1 else f"{threads}_threads"
            self.figure(f"host_digest_gigabytes_per_second_{name}", nbytes / median(seconds) / 1e9)

    def measure_pause(self, fleet: Fleet, weights: Mapping[str, torch.Tensor], staging: Staging) -> None:
        """Refits from the host's memory while the engine serves a steady load."""
        fleet.start(RefitPolicy(transport=Transport.COLOCATED, staging=staging))
        with fleet.connect() as trainer:
            # The first refits calibrate, prepare and warm up; they are no part of the figures.
            for what in ("first, from host memory", "second, from host memory"):
                self._refit(trainer, weights, what)
            load = Load(self.folder, fleet.engines[0].url, STREAMS, 64 if TINY else 512)
            try:
                load.await_tokens(STREAMS * 8)
                quiet, measured = [], []
                # What an engine serves drifts by a few per cent in a minute: each refit is beside the seconds before it.
                for _ in range(PAUSE_ROUNDS):
                    time.sleep(SETTLING_SECONDS)
                    began = time.monotonic()
                    time.sleep(QUIET_SECONDS)
                    quiet.append((began, time.monotonic()))
                    measured.append(self._refit(trainer, weights, f"under load, staging {staging}"))
                time.sleep(SETTLING_SECONDS)
            finally:
                arrivals = load.stop()
        if staging is Staging.AUTO and not all(refit.result.staged for refit in measured):
            raise RuntimeError(f"not staged although it was asked for: {measured[-1].result.reason}")
        serving = summarize(arrivals, quiet, measured)
        self.record.add(shape=self.shape.name, what=f"serving, staging {staging}", **serving.as_run())
        pause = median([refit.result.pause_seconds for refit in measured])
        prefix = "" if staging is Staging.AUTO else "unstaged_"
        self.figure(f"{prefix}pause_seconds", pause)
        self.figure(f"{prefix}pause_times_flat_copy", pause / self.floor)
        self.figure(f"{prefix}serving_kept_percent", serving.kept_percent)
        self.figure(f"{prefix}token_gap_p99_before_seconds", serving.before_p99)
        self.figure(f"{prefix}token_gap_p99_across_seconds", serving.across_p99)

    def _refit(self, trainer: Any, weights: Mapping[str, torch.Tensor], what: str) -> Measured:
        version = next_version(trainer)
        measured = measured_refit(trainer, weights, version)
        self.record.add(**measured.as_run(shape=self.shape.name, what=what))
        say(
            f"{self.shape.name}: {what}: {measured.seconds * 1e3:.1f} ms, pause {measured.result.pause_seconds * 1e3:.1f} ms,"
            f" {measured.result.transport}, staged {measured.result.staged}, {len(measured.result.detours)} detours"
        )
        return measured


def start_engine(folder: Path, shape: Shape, *, graphs: bool) -> Engine:
    """An engine of a fleet; with another NCCL_HOSTID than this process, NCCL takes the two for two hosts and one GPU will do."""
    return Engine(folder, folder / "model", engine_arguments(shape, graphs=graphs), more={"NCCL_HOSTID": "engine"})


def measure(record: Record, shape: Shape, folder: Path, rounds: int, parts: set[str], *, graphs: bool) -> None:
    """All parts of one shape."""
    with ExitStack() as stack:
        measurement = Measurement(record, shape, folder, rounds)
        weights = shape.weights(1)
        engine = start_engine(folder, shape, graphs=graphs)
        stack.callback(lambda: engine.stop())
        if "rivals" in parts:
            backend = None if TINY else "ipc"
            stock = rivals.StockEngine(folder, folder / "model", engine_arguments(shape), backend=backend)
            stack.callback(stock.stop)
        try:
            engine.await_started()
        except StartError as error:
            if not graphs:
                raise
            say(f"{shape.name}: no start with CUDA graphs, starting without: {error}")
            engine.stop()
            engine = start_engine(folder, shape, graphs=False)
            engine.await_started()
        fleet = Fleet(folder, [engine])
        stack.callback(fleet.stop_sync)
        with record.part(f"{shape.name}: floor"):
            measurement.measure_floor()
        if "rivals" in parts:
            with record.part(f"{shape.name}: rivals"):
                stock.await_started()
                measurement.measure_rivals(stock, weights)
            stock.stop()
        if "ours" in parts:
            with record.part(f"{shape.name}: ours"):
                measurement.measure_ours(fleet, weights)
        if "trace" in parts:
            with record.part(f"{shape.name}: trace"):
                record.add(shape=shape.name, what="trace", **trace_refit(fleet, weights, folder))
        if "pause" in parts:
            with record.part(f"{shape.name}: host digest"):
                measurement.measure_host_digest()
            with record.part(f"{shape.name}: host memory"):
                host = {name: tensor.cpu() for name, tensor in weights.items()}
                if not TINY:
                    measurement.keep("copy from pinned memory", from_pinned(shape.nbytes, 3))
                del weights
                release()
            for staging in Staging:
                with record.part(f"{shape.name}: pause, staging {staging}"):
                    measurement.measure_pause(fleet, host, staging)
        for name, failure in record.failures.items():
            if name.startswith(shape.name):
                say(f"{name}: {failure}")
                say(fleet.logs())
                break


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("--shapes", default="dense,moe")
    options.add_argument(
        "--parts", default=",".join(PARTS), help="of each shape; the pause is measured for the dense one"
    )
    options.add_argument("--add", action="store_true", help="add to what the output file holds from a run before")
    options.add_argument("--eager", action="store_true", help="no CUDA graphs")
    chosen = options.parse_args()
    # Set before NCCL is loaded; the engine has another.
    os.environ["NCCL_HOSTID"] = "trainer"
    record = Record(NAME, chosen.output)
    if chosen.add:
        record.resume()
    for name in chosen.shapes.split(","):
        parts = set(chosen.parts.split(",")) - (set() if name == "dense" else {"pause", "trace"})
        with record.part(name), run_folder() as folder:
            measure(record, SHAPES[name](), folder, chosen.rounds, parts, graphs=name == "dense" and not chosen.eager)
        release()
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
