"""One rank's process: a model that is nothing but weights, and the fleet's own transfer engine beside it."""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from ctypes import CDLL
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.chaos.weights import checksum_of, named_weights, shard_of

from rolloutfleet_worker.rank.engine import FleetTransferEngine
from rolloutfleet_worker.rank.receiver import Receiver

ENV_DAWDLE = "CHAOS_DAWDLE"
"""JSON: how many seconds more each operation takes, as it would with real weights, so that a fault can meet it."""
_PR_SET_NAME, _PR_SET_PDEATHSIG, _SIGKILL = 15, 1, 9


class HeldWeights(torch.nn.Module):  # type: ignore[misc]
    """The weights of one rank, and a loader that cuts its share out of a checkpoint's tensors."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        layers: dict[str, torch.nn.Module] = {}
        for name, array in named_weights(0):
            _, layer, leaf = name.split(".")
            module = layers.setdefault(layer, torch.nn.Module())
            share = torch.from_numpy(shard_of(array, rank, ranks).copy())
            module.register_parameter(leaf, torch.nn.Parameter(share, requires_grad=False))
        self.layers = torch.nn.ModuleList(layers.values())

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in tensors:
            parameter = parameters[name]
            rows = parameter.shape[0]
            share = tensor if tensor.dim() == 1 else tensor.narrow(0, self._rank * rows, rows)
            parameter.data.copy_(share)
            loaded.add(name)
        return loaded

    def checksum(self) -> str:
        """Over what lies in the live weights at this moment, read one after another as a step of a model would."""
        parameters = dict(self.named_parameters())
        return checksum_of(parameter.detach().numpy() for _, parameter in _in_order(parameters))


def _in_order(parameters: dict[str, Any]) -> list[tuple[str, Any]]:
    """The parameters in the order of a checkpoint."""
    return sorted(parameters.items(), key=lambda item: (int(item[0].split(".")[1]), item[0].endswith("norm")))


def _dawdling(operation: str, seconds: float) -> None:
    original = getattr(Receiver, operation)

    def slowed(self: Receiver, body: dict[str, Any], cancelled: threading.Event) -> dict[str, Any]:
        cancelled.wait(seconds)
        answer: dict[str, Any] = original(self, body, cancelled)
        return answer

    setattr(Receiver, operation, slowed)


def serve(connection: Connection, rank: int, ranks: int) -> None:
    """Answer the server's requests, one after another, until it is gone."""
    library = CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    library.prctl(_PR_SET_NAME, f"chaos-rank-{rank}".encode())
    torch.set_num_threads(1)
    for operation, seconds in json.loads(os.environ.get(ENV_DAWDLE, "{}")).items():
        _dawdling(operation, float(seconds))
    model = HeldWeights(rank, ranks)
    parallel = SimpleNamespace(
        enable_eplb=False, tensor_parallel_size=ranks, world_size=ranks, rank=rank, data_parallel_index=0
    )
    text = SimpleNamespace(tie_word_embeddings=False)
    config = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=text), lora_config=None
    )
    engine = FleetTransferEngine(None, config, torch.device("cpu"), model)
    acts: dict[str, Callable[..., Any]] = {
        "step": model.checksum,
        "start_weight_update": engine.start_weight_update,
        "update_weights": engine.update_weights,
        "finish_weight_update": engine.finish_weight_update,
    }
    connection.send(("", None))
    while True:
        try:
            act, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("", acts[act](**arguments)))
        except Exception as error:  # noqa: BLE001 - the outermost loop of the process; the server raises what it is told
            connection.send((f"{type(error).__name__}: {error}", None))


def main() -> None:
    descriptor, rank, ranks = map(int, sys.argv[1:])
    serve(Connection(descriptor), rank, ranks)


if __name__ == "__main__":
    main()
