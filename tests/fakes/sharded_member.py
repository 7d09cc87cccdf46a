"""One process of a gloo team that looks at its parts of sharded tensors: ``python -m fakes.sharded_member CASE RANK RANKS FOLDER``.

Every element that the source says it holds is compared with the tensor that torch gathers from all ranks; what it holds is printed.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rolloutfleet.layout.blocks import Block
from rolloutfleet.sources import NamedTensors
from rolloutfleet.sources.merging import merge_manifests

Tensors = dict[str, torch.Tensor]


class Layers(torch.nn.Module):
    """Two linear layers and a norm, of sizes that two and three do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(7, 11)
        self.down = torch.nn.Linear(11, 5, bias=False)
        self.norm = torch.nn.LayerNorm(5)
        self.lone = torch.nn.Parameter(torch.randn(1, 3))


def fsdp(ranks: int) -> Tensors:
    model = Layers()
    fully_shard(model.up)
    fully_shard(model)
    return dict(model.named_parameters())


def fsdp_of_bfloat16_on_the_second_dimension(ranks: int) -> Tensors:
    model = torch.nn.Sequential(torch.nn.Linear(12, 7, bias=False), torch.nn.Linear(6, 11, bias=False)).bfloat16()
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    return dict(model.named_parameters())


def fsdp_in_another_order_on_every_rank(ranks: int) -> Tensors:
    named = list(fsdp(ranks).items())
    first = dist.get_rank() * 2
    return dict(reversed(named[first:] + named[:first]))


def hsdp(ranks: int) -> Tensors:
    model = Layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))
    return dict(model.named_parameters())


def fsdp_over_tensor_parallel(ranks: int) -> Tensors:
    model = torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Linear(16, 6, bias=False))
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return dict(model.named_parameters())


def uneven_placements(ranks: int) -> Tensors:
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: distribute_tensor(torch.randn(shape), mesh, [placement])
        for name, shape, placement in (
            ("rows", (5, 4), Shard(0)),
            ("columns", (3, 7), Shard(1)),
            ("middle", (2, 5, 3), Shard(1)),
            ("short", (1, 6), Shard(0)),
            ("same", (4, 4), Replicate()),
            ("last", (3, 2, 4), Shard(-1)),
        )
    }


def two_dimensions(ranks: int) -> Tensors:
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    return {
        "blocks": distribute_tensor(torch.randn(5, 7), mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(torch.randn(11, 3), mesh, [Shard(0), Shard(0)]),
        "inner": distribute_tensor(torch.randn(2, 3, 5), mesh, [Shard(2), Shard(1)]),
        "half": distribute_tensor(torch.randn(6, 3), mesh, [Replicate(), Shard(0)]),
    }


CASES: dict[str, Callable[[int], Tensors]] = {
    case.__name__: case
    for case in (
        fsdp,
        fsdp_of_bfloat16_on_the_second_dimension,
        fsdp_in_another_order_on_every_rank,
        hsdp,
        fsdp_over_tensor_parallel,
        uneven_placements,
        two_dimensions,
    )
}


def check_piece(source: NamedTensors, index: int, block: Block, whole: torch.Tensor) -> None:
    """Every way to read a piece, or a part of it, gives what the gathered tensor has there."""
    for part in (block, Block(block.offset, block.rows, max(block.run // 2, 1), block.stride)):
        expected = whole.flatten().as_strided((part.rows, part.run), (part.stride, 1), part.offset).flatten()
        assert torch.equal(source.read(index, part), expected)
        assert torch.equal(source.read(index, part, torch.float64), expected.double())
        spans = source.spans(index, part)
        assert spans is not None
        found = [
            span.tensor.as_strided(
                (span.block.rows, span.block.run),
                (span.block.stride, 1),
                span.tensor.storage_offset() + span.block.offset,
            ).flatten()
            for span in spans
        ]
        assert torch.equal(torch.cat(found), expected)


def main(case: str, rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(5)
    tensors = CASES[case](ranks)
    source = NamedTensors(tensors, sharded=True)
    manifests = [source.manifest()] * ranks
    dist.all_gather_object(manifests, manifests[rank])
    manifest = merge_manifests(manifests)
    source.bind(manifest)
    holdings = source.holdings(rank, ranks)
    holdings.check(manifest)
    # Every rank gathers in the manifest's order: torch's own gathering waits for ever otherwise.
    named = [tensors[spec.name] for spec in manifest.tensors]
    wholes = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in named]
    assert [spec.shape for spec in manifest.tensors] == [tuple(whole.shape) for whole in wholes]
    for piece in holdings.pieces:
        check_piece(source, piece.source, piece.block, wholes[piece.source].detach())
    (folder / f"{rank}.manifest").write_text(manifest.model_dump_json())
    (folder / f"{rank}.holdings").write_bytes(holdings.encode())
    dist.barrier()
    # Threads of torch's own groups that come back into an interpreter that is ending abort the process, once in hundreds of times.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
