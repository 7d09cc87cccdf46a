"""Two processes on one GPU share a model's memory: shown, mapped, copied, moved, shown again, and let go of when one is killed.

This process is the worker; it starts the trainer as another. Fifty refits, every tenth after the trainer's memory has moved, must leave
the device's memory as it was after the second, hold no more mappings than the trainer has segments, and give the trainer's bytes each
time. Then the trainer is killed: its memory is free within five seconds of the worker letting go, and the next trainer works. A trainer
with expandable segments must be refused with a sentence that says what to set. Prints one line of JSON; leaves with 1 when something is
wrong. By hand::

    PYTHONPATH=client python3 tests/gpu/memory.py          # TINY=1 for a machine without GPU
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from rolloutfleet.layout.blocks import Block
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet.transport.memory import Exporter, Mapper

TINY = os.environ.get("TINY") == "1"
DEVICE = torch.device("cpu" if TINY else "cuda:0")
SHAPES = [(7, 64), (1000,)] * 20 if TINY else [(18_944, 3584), (3584,), (4608, 3584), (1,)] * 20
ROUNDS = 50
MOVED_EVERY = 10
SLACK = 32 << 20
"""Bytes by which the driver's own count of used memory may differ between rounds."""


def model(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16) for shape in SHAPES]


def trainer() -> None:
    """Obeys lines ``show SEED`` and ``move``; answers each with one line."""
    exporter = Exporter()
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in SHAPES]
    for line in sys.stdin:
        order, *rest = line.split()
        if order == "move":
            tensors.clear()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in SHAPES]
            print("moved", flush=True)
            continue
        for tensor, value in zip(tensors, model(int(rest[0])), strict=True):
            tensor.copy_(value)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        started = time.perf_counter()
        try:
            message = exporter.export(tensors).decode()
        except ValueError as error:
            message = json.dumps({"refused": str(error)})
        print(json.dumps({"message": message, "export_ms": (time.perf_counter() - started) * 1e3}), flush=True)


class Trainer:
    def __init__(self, **environment: str) -> None:
        command = [sys.executable, __file__, "trainer"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment})

    def ask(self, order: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the trainer ended with {self.process.wait(30)} when told to {order}")
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


class Worker:
    """Maps what it is shown, and copies it into parameters of its own."""

    def __init__(self) -> None:
        self.live = [torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in SHAPES]
        self.mapper = Mapper(DEVICE)
        self.message = ""
        self.table: CopyTable | None = None
        self.map_ms = 0.0
        self.copy_ms = 0.0

    def refit(self, message: str, seed: int) -> None:
        if message != self.message:
            self.table = None
            started = time.perf_counter()
            shown = self.mapper.map(message.encode())
            self.map_ms = (time.perf_counter() - started) * 1e3
            self.message = message
            blocks = [Block(0, 1, tensor.numel(), tensor.numel()) for tensor in shown]
            self.table = CopyTable.build(zip(shown, blocks, self.live, blocks, strict=True))
        assert self.table is not None
        started = time.perf_counter()
        self.table.run()
        wait()
        self.copy_ms = (time.perf_counter() - started) * 1e3
        wrong = sum(not torch.equal(held, sent) for held, sent in zip(self.live, model(seed), strict=True))
        if wrong:
            raise SystemExit(f"refit {seed}: {wrong} of {len(self.live)} tensors differ from the trainer's")

    def read_after_kill(self) -> str:
        """What becomes of a copy out of a dead trainer's memory: ``copied``, or the error, after which a CUDA context is of no use."""
        assert self.table is not None
        try:
            self.table.run()
            wait()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return "copied"

    def let_go(self) -> None:
        self.table, self.message = None, ""
        self.mapper.close()


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def used_bytes() -> int:
    """What all processes use of the device; of shared memory, on a CPU."""
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(DEVICE)
        return total - free
    return sum(path.stat().st_size for path in Path("/dev/shm").glob("rolloutfleet-*"))


def main() -> None:
    sides = Trainer(), Worker()
    first, worker = sides
    used, segments = [], set()
    for seed in range(ROUNDS):
        if seed and seed % MOVED_EVERY == 0:
            # The trainer frees nothing that a worker still has mapped.
            worker.let_go()
            first.ask("move")
        answer = json.loads(first.ask(f"show {seed}"))
        worker.refit(answer["message"], seed)
        segments.add(len(json.loads(answer["message"])["segments"]))
        assert worker.mapper.segments == len(json.loads(answer["message"])["segments"])
        used.append(used_bytes())
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "bytes": sum(tensor.nbytes for tensor in worker.live),
        "tensors": len(SHAPES),
        "most_segments": max(segments),
        "rounds": ROUNDS,
        "grown_bytes": max(used[2:]) - used[2],
        "export_ms": answer["export_ms"],
        "map_ms": worker.map_ms,
        "copy_ms": worker.copy_ms,
    }
    first.kill()
    killed = time.monotonic()
    report["read_after_kill"] = worker.read_after_kill()
    worker.let_go()
    if report["read_after_kill"] != "copied":
        raise SystemExit(json.dumps(report))
    while used_bytes() > used[2] - sum(tensor.nbytes for tensor in worker.live) and time.monotonic() < killed + 10:
        time.sleep(0.05)
    report["freed_after_kill_seconds"] = time.monotonic() - killed
    second = Trainer()
    worker.refit(json.loads(second.ask("show 99"))["message"], 99)
    second.kill()
    worker.let_go()
    if DEVICE.type == "cuda":
        refused = Trainer(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        report["expandable"] = json.loads(json.loads(refused.ask("show 1"))["message"]).get("refused", "")
        refused.kill()
    print(json.dumps(report))
    right = (
        int(str(report["grown_bytes"])) <= SLACK
        and float(str(report["freed_after_kill_seconds"])) < 5
        and max(segments) < len(SHAPES)
        and "expandable_segments:False" in str(report.get("expandable", "expandable_segments:False"))
    )
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    trainer() if sys.argv[1:] == ["trainer"] else main()
