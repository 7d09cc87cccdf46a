"""Qwen3-30B-A3B's shape, all 48 layers (61 GB), from one GPU to an engine on another."""

import sys

from benchmarks.shapes import experts
from benchmarks.two_gpus import run

if __name__ == "__main__":
    sys.exit(run("refit_moe_30b", __doc__, experts(48)))
