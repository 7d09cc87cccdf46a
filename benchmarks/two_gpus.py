"""Trainer on one GPU, engine on another: a refit over the wire beside the wire itself and beside vLLM's packed NCCL engine.

The engine has the first GPU, the trainer (this process) the last. ``TINY=1`` runs it with Gloo between processes on CPUs, without the
rival, which needs GPUs.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import rivals
from benchmarks.digests import switch_digests
from benchmarks.floors import release
from benchmarks.processes import Engine, Fleet
from benchmarks.record import TINY, Record, median, say
from benchmarks.refits import Measured, measured_refit, next_version
from benchmarks.shapes import Shape
from benchmarks.starting import engine_arguments, parser, run_folder
from benchmarks.wire_floor import broadcast_floor
from rolloutfleet.contract.policy import RefitPolicy, Staging, Transport
from rolloutfleet.contract.trainer import Phase

SIDE_BY_SIDE_BYTES = 50 << 30
"""Two engines of larger models do not fit one GPU together."""


class Measurement:
    """The parts of one benchmark."""

    def __init__(self, record: Record, shape: Shape, folder: Path, rounds: int) -> None:
        self.record = record
        self.shape = shape
        self.folder = folder
        self.rounds = rounds
        self.model = shape.write(folder / "model")
        self.device = "cpu" if TINY else f"cuda:{torch.cuda.device_count() - 1}"
        self.first = "cpu" if TINY else "cuda:0"
        self.floor = 0.0
        self.rival = 0.0

    def run(self) -> None:
        if not TINY:
            torch.cuda.set_device(self.device)
        with ExitStack() as stack:
            weights = self.shape.weights(1, self.device)
            with self.record.part("floor"):
                seconds = broadcast_floor(self.folder, self.shape.nbytes, self.device, self.first, self.rounds)
                self.record.add(what="broadcast", seconds=seconds, nbytes=self.shape.nbytes)
                self.floor = median(seconds)
                self.record.figure("floor_seconds", self.floor)
            together = self.shape.nbytes < SIDE_BY_SIDE_BYTES
            engine = self._engine(stack) if together else None
            if not TINY:
                with self.record.part("rival"):
                    self._measure_rival(weights)
            engine = engine or self._engine(stack)
            fleet = Fleet(self.folder, [engine])
            stack.callback(fleet.stop_sync)
            for staging in (Staging.NEVER, *([Staging.AUTO] if together else [])):
                with self.record.part(f"ours, staging {staging}"):
                    self._measure_ours(fleet, weights, staging)
            if self.record.failures:
                say(fleet.logs())

    def _engine(self, stack: ExitStack) -> Engine:
        visible = {} if TINY else {"CUDA_VISIBLE_DEVICES": "0"}
        engine = Engine(self.folder, self.model, engine_arguments(self.shape), more=visible)
        stack.callback(engine.stop)
        return engine

    def _measure_rival(self, weights: Mapping[str, torch.Tensor]) -> None:
        stock = rivals.StockEngine(
            self.folder, self.model, engine_arguments(self.shape), backend="nccl", more={"CUDA_VISIBLE_DEVICES": "0"}
        )
        try:
            stock.await_started()
            seconds = rivals.send_nccl(stock, weights, self.rounds, world_size=2)
        finally:
            stock.stop()
        self.record.add(what="vLLM nccl, packed", seconds=seconds, nbytes=self.shape.nbytes)
        self.rival = median(seconds)
        self.record.figure("vllm_packed_seconds", self.rival)

    def _measure_ours(self, fleet: Fleet, weights: Mapping[str, torch.Tensor], staging: Staging) -> None:
        fleet.start(RefitPolicy(transport=Transport.LAYOUT, staging=staging))
        with fleet.connect() as trainer:
            for what in ("first, through vLLM's loader", "second, by layout"):
                self._refit(trainer, weights, what)
            on = [self._refit(trainer, weights, f"digests on, staging {staging}") for _ in range(self.rounds)]
            if staging is Staging.AUTO:
                self.record.figure("staged_refit_seconds", median([refit.seconds for refit in on]))
                self.record.figure("staged_pause_seconds", median([refit.result.pause_seconds for refit in on]))
                return
            try:
                fleet.engines[0].call("benchmark_digests", "off")
                switch_digests(on=False)
                off = [self._refit(trainer, weights, "digests off") for _ in range(self.rounds)]
            finally:
                switch_digests(on=True)
                fleet.engines[0].call("benchmark_digests", "on")
        wire_on, wire_off = (median([_transfer(refit) for refit in refits]) for refits in (on, off))
        whole = median([refit.seconds for refit in on])
        self.record.figure("transfer_seconds", wire_on)
        self.record.figure("refit_seconds", whole)
        self.record.figure("pause_seconds", median([refit.result.pause_seconds for refit in on]))
        self.record.figure("times_floor_digest_on", wire_on / self.floor)
        self.record.figure("times_floor_digest_off", wire_off / self.floor)
        self.record.figure("cycle_beyond_wire_ms", (whole - self.floor) * 1e3)
        if self.rival:
            self.record.figure("times_faster_than_vllm_packed", self.rival / wire_on)
            self.record.figure("whole_refit_times_faster_than_vllm_packed", self.rival / whole)

    def _refit(self, trainer: Any, weights: Mapping[str, torch.Tensor], what: str) -> Measured:
        measured = measured_refit(trainer, weights, next_version(trainer))
        self.record.add(**measured.as_run(what=what))
        say(f"{what}: {measured.seconds * 1e3:.1f} ms, transfer {_transfer(measured) * 1e3:.1f} ms")
        return measured


def _transfer(refit: Measured) -> float:
    """Seconds of the transfer as the sync job saw it: from the order to receive to the last rank's report, digests compared."""
    return refit.result.seconds[Phase.TRANSFERRING]


def run(name: str, description: str | None, shape: Shape) -> int:
    """Run one benchmark of this kind; its exit code."""
    options = parser(description, name).parse_args()
    if not TINY and torch.cuda.device_count() < 2:
        say(f"{name} needs two GPUs, and {torch.cuda.device_count()} are here; TINY=1 runs it on CPUs")
        return 2
    record = Record(name, options.output)
    with run_folder() as folder, record.part("all"):
        Measurement(record, shape, folder, options.rounds).run()
    release()
    return record.exit_code
