"""A dense 7B model (15.2 GB) from one GPU to an engine on another, beside the wire and beside vLLM's packed NCCL engine."""

import sys

from benchmarks.shapes import dense
from benchmarks.two_gpus import run

if __name__ == "__main__":
    sys.exit(run("refit_dense_7b", __doc__, dense()))
