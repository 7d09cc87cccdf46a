"""The floor of a refit between two GPUs: one broadcast of the same bytes, with nothing around it.

Run as a program it is the second rank, started by :func:`broadcast_floor` in the first.
"""

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from benchmarks.floors import CHUNK_BYTES, release, synchronize
from benchmarks.processes import Program, free_ports
from benchmarks.record import median, say

_SECONDS = 120


def broadcast_floor(folder: Path, nbytes: int, device: str, other: str, rounds: int) -> list[float]:
    """Seconds of each broadcast of ``nbytes`` from ``device`` to ``other`` (``cpu`` runs Gloo), in chunks of 1 GiB."""
    port, _ = free_ports()
    arguments = ["--port", str(port), "--bytes", str(nbytes), "--device", other, "--rounds", str(rounds)]
    second = Program(folder / "wire-floor.log", ["-m", "benchmarks.wire_floor", *arguments])
    try:
        seconds = _broadcast(0, port, nbytes, device, rounds)
    finally:
        second.stop()
    say(f"floor: broadcast of {nbytes / 1e9:.3f} GB: {median(seconds) * 1e3:.2f} ms")
    return seconds


def _broadcast(rank: int, port: int, nbytes: int, device: str, rounds: int) -> list[float]:
    """Both ranks' side; the first two rounds warm up."""
    if device != "cpu":
        torch.cuda.set_device(device)
    # No device_id= here: together with a barrier it has hung for minutes on a pair of GPUs.
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_SECONDS),
    )
    try:
        chunks = torch.empty(nbytes, dtype=torch.uint8, device=device).split(CHUNK_BYTES)
        seconds = []
        for _ in range(rounds + 2):
            torch.distributed.barrier()
            synchronize()
            began = time.perf_counter()
            for chunk in chunks:
                torch.distributed.broadcast(chunk, 0)
            synchronize()
            seconds.append(time.perf_counter() - began)
    finally:
        torch.distributed.destroy_process_group()
        release()
    return seconds[2:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    _broadcast(1, options.port, options.bytes, options.device, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
