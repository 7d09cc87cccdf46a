"""A trainer of several processes, whose models FSDP2 shards: one refit for each line of standard input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from tests.engines.hostfleet import REPOSITORY, TOKEN, HostFleet
from tests.engines.tinymodels import make_model, vary_vectors
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import rolloutfleet
from rolloutfleet.contract.trainer import RefitResult

REFIT_SECONDS = 120.0


def trained_model(folder: Path, seed: int) -> PreTrainedModel:
    """Every rank's model of this seed, whole."""
    return vary_vectors(make_model(folder, seed))


class ShardedTrainers:
    """The processes, from the connection to the end of a ``with`` block."""

    def __init__(self, fleet: HostFleet, ranks: int, folder: Path) -> None:
        self._fleet = fleet
        command = [sys.executable, "-m", "tests.engines.shardedtrainers", fleet.address, str(fleet.model), str(folder)]
        self._members = [
            subprocess.Popen(
                [*command, str(rank), str(ranks)],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.stdin.close()
        try:
            codes = [member.wait(REFIT_SECONDS) for member in self._members]
        finally:
            for member in self._members:
                member.kill()
                member.wait()
                member.stdout.close()
        assert codes == [0] * len(codes)

    def refit(self, seed: int) -> RefitResult:
        """What every rank of the trainer has as the result of the fleet's next version."""
        version = self._fleet.next_version()
        for member in self._members:
            print(json.dumps({"seed": seed, "version": version}), file=member.stdin, flush=True)
        answers = [member.stdout.readline() for member in self._members]
        assert len(set(answers)) == 1, answers
        result = RefitResult.model_validate_json(answers[0])
        assert (result.version, result.members) == (version, tuple(engine.name for engine in self._fleet.engines))
        return result


def main(address: str, folder: Path, meeting: Path, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=ranks)
    model = make_model(folder, 0)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with rolloutfleet.connect(address, token=TOKEN, team=dist.group.WORLD, timeout=60.0) as fleet:
        for line in sys.stdin:
            order = json.loads(line)
            values = trained_model(folder, order["seed"]).state_dict()
            set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
            del values
            result = fleet.refit(model, version=order["version"], timeout=REFIT_SECONDS)
            print(result.model_dump_json(), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
