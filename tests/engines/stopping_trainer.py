"""A trainer in a process of its own that stops itself when the first bucket has left; says how its refit ended when it goes on."""

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
from tests.engines.hostfleet import TOKEN
from tests.engines.tinymodels import make_model, named_tensors

import rolloutfleet
from rolloutfleet.transport import gloo

_broadcast = gloo.Group.broadcast


def broadcast_and_stop(group: gloo.Group, tensor: torch.Tensor, root: int, deadline: float) -> None:
    """Gloo's own broadcast, of which the first is the last before somebody lets this process go on."""
    _broadcast(group, tensor, root, deadline)
    os.kill(os.getpid(), signal.SIGSTOP)


def main(address: str, folder: Path, version: int) -> None:
    tensors = named_tensors(make_model(folder, 99))
    try:
        with (
            rolloutfleet.connect(address, token=TOKEN) as fleet,
            mock.patch.object(gloo.Group, "broadcast", broadcast_and_stop),
        ):
            fleet.refit(tensors, version=version)
    except rolloutfleet.RolloutFleetError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error), "phase": error.phase}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
