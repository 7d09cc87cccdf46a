"""A trainer in a process of its own that stops itself when the first bucket has left; says how its refit ended when it goes on."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.engines.hostfleet import TOKEN
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet


class Stopping:
    """Named tensors whose second reading, the one that sends, stops this process at the second tensor: a bucket later."""

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self._named = named
        self._readings = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._readings += 1
        for index, item in enumerate(self._named.items()):
            if self._readings == 2 and index == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield item


def main(address: str, folder: Path, version: int) -> None:
    tensors = Stopping(named_tensors(make_model(folder, 99)))
    try:
        with rolloutfleet.connect(address, token=TOKEN) as fleet:
            fleet.refit(tensors, version=version)
    except rolloutfleet.RolloutFleetError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error), "phase": error.phase}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
