"""One process of a trainer whose model FSDP2 shards: ``python -m fakes.team_trainer URL TOKEN RANK RANKS FOLDER``.

Refits twice, and leaves what every rank had as result, and what torch gathers of the model after each, in the folder.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import rolloutfleet
from fakes.sharded_member import Layers


def main(url: str, token: str, rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(11)
    model = Layers()
    fully_shard(model)
    with rolloutfleet.connect(url, token=token, team=dist.group.WORLD, timeout=60.0) as fleet:
        for version in (1, 2):
            result = fleet.refit(model, version=version, timeout=120.0)
            (folder / f"{version}-{rank}.json").write_text(result.model_dump_json())
            gathered = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]
            if rank == 0:
                torch.save(torch.cat(gathered), folder / f"{version}.pt")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
