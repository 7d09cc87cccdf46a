"""A trainer in a process of its own that kills itself in the middle of its second refit; its first one completes.

It prints ``refitted VERSION`` after the first, and ``dies TIME`` (monotonic clock) right before the kill.
"""

import argparse
import os
import signal
import sys
import threading
import time

import rolloutfleet
from benchmarks.processes import TOKEN
from benchmarks.shapes import dense, fill
from rolloutfleet.contract.trainer import Phase, RefitView


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--toy-vocabulary", type=int, required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--after", type=float, required=True, help="seconds in the transfer before the kill")
    options = parser.parse_args()

    def die() -> None:
        print(f"dies {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    dying: list[threading.Timer] = []

    def watch(view: RefitView) -> None:
        if view.phase is Phase.TRANSFERRING and not dying:
            dying.append(threading.Timer(options.after, die))
            dying[0].start()

    weights = dense(options.layers, toy_vocabulary=options.toy_vocabulary).weights(options.version)
    with rolloutfleet.connect(options.address, token=TOKEN, timeout=60.0) as fleet:
        fleet.refit(weights, options.version)
        print(f"refitted {options.version}", flush=True)
        fill(weights, options.version + 1)
        fleet.refit(weights, options.version + 1, progress=watch)
    return 1


if __name__ == "__main__":
    sys.exit(main())
