"""Engine arguments, command-line options and the folder of a run, alike for every benchmark."""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.record import RESULTS, ROOT, TINY
from benchmarks.shapes import Shape

KV_CACHE_BYTES = 6 << 30
ROUNDS = 3 if TINY else 12


def engine_arguments(shape: Shape, *, graphs: bool = False, kv_cache_bytes: int = KV_CACHE_BYTES) -> list[str]:
    """What vLLM is started with: no weights, a fixed cache, so that engines may start side by side on one GPU.

    ``graphs`` captures CUDA graphs of whole decode steps, without compiling: steps are then bound by memory, as in production.
    """
    arguments = [
        "--load-format=dummy",
        f"--dtype={str(shape.dtype).removeprefix('torch.')}",
        f"--max-model-len={256 if TINY else 2048}",
        "--max-num-seqs=64",
        "--seed=7",
    ]
    if TINY or not graphs:
        arguments.append("--enforce-eager")
    else:
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 16, 32, 64]}
        arguments.append(f"--compilation-config={json.dumps(compilation)}")
    if not TINY:
        # With a given cache size vLLM does not measure free memory, which other processes' start-up would upset.
        arguments += [f"--kv-cache-memory-bytes={kv_cache_bytes}", "--gpu-memory-utilization=0.1"]
    return arguments


def results_folder() -> Path:
    """Where results go; those of a dry run, which proves the program and not the figures, keep away from the others."""
    return ROOT / ("build/benchmarks" if TINY else RESULTS)


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=results_folder() / f"{name}.json")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="measured repetitions (default: %(default)s)")
    return made


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder for models, logs and sockets; BENCHMARK_KEEP=DIRECTORY keeps it there."""
    if kept := os.environ.get("BENCHMARK_KEEP"):
        yield Path(tempfile.mkdtemp(prefix="run-", dir=kept))
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        yield Path(folder)
