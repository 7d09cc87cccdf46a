"""Parts of tensors, against what torch itself gathers or slices: FSDP2 and other DTensors in real gloo teams, and tables of shards."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rolloutfleet.contract.manifest import Manifest  # noqa: E402 - only where torch is
from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.layout.holdings import Holdings  # noqa: E402
from rolloutfleet.sources import NamedTensors, Shard, ShardedTensors  # noqa: E402

TESTS = Path(__file__).parents[2]


def team(case: str, ranks: int, folder: Path) -> tuple[Manifest, list[Holdings]]:
    """The manifest and the holdings of every rank of a team whose processes have compared them with gathered tensors."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "fakes.sharded_member", case, str(rank), str(ranks), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [member.communicate(timeout=120)[1] for member in members]
    assert [member.returncode for member in members] == [0] * ranks, "\n".join(errors)
    manifests = {(folder / f"{rank}.manifest").read_text() for rank in range(ranks)}
    assert len(manifests) == 1
    held = [Holdings.decode((folder / f"{rank}.holdings").read_bytes()) for rank in range(ranks)]
    return Manifest.model_validate_json(manifests.pop()), held


def copies(manifest: Manifest, held: list[Holdings]) -> dict[str, set[int]]:
    """By tensor: on how many ranks its elements lie, each number once."""
    found: list[Counter[int]] = [Counter() for _ in manifest.tensors]
    for holdings in held:
        for piece in holdings.pieces:
            block = piece.block
            for row in range(block.rows):
                begin = block.offset + row * block.stride
                found[piece.source].update(range(begin, begin + block.run))
    return {
        spec.name: {counts[element] for element in range(spec.elements)}
        for spec, counts in zip(manifest.tensors, found, strict=True)
    }


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ["fsdp", "fsdp_of_bfloat16_on_the_second_dimension"])
def test_an_fsdp_team_holds_every_element_once_without_gathering(case: str, ranks: int, tmp_path: Path) -> None:
    assert set.union(*copies(*team(case, ranks, tmp_path)).values()) == {1}


@pytest.mark.scenario("F55")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_name_their_tensors_in_different_orders_agree_and_wait_for_nobody(
    ranks: int, tmp_path: Path
) -> None:
    manifest, held = team("fsdp_in_another_order_on_every_rank", ranks, tmp_path)
    assert set.union(*copies(manifest, held).values()) == {1}


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_parts_are_held_once_and_replicas_by_every_rank(ranks: int, tmp_path: Path) -> None:
    numbers = copies(*team("uneven_placements", ranks, tmp_path))
    assert numbers.pop("same") == {ranks}
    assert set.union(*numbers.values()) == {1}


def test_replicas_of_hybrid_sharding_are_declared_by_all_who_have_them(tmp_path: Path) -> None:
    manifest, held = team("hsdp", 4, tmp_path)
    assert set.union(*copies(manifest, held).values()) == {2}
    assert held[0].pieces == held[2].pieces != held[1].pieces == held[3].pieces


def test_fsdp_over_tensor_parallel_is_held_once(tmp_path: Path) -> None:
    numbers = copies(*team("fsdp_over_tensor_parallel", 4, tmp_path))
    assert set.union(*numbers.values()) == {1}


def test_meshes_of_two_dimensions_cut_both_ways(tmp_path: Path) -> None:
    numbers = copies(*team("two_dimensions", 4, tmp_path))
    assert numbers.pop("half") == {2}
    assert set.union(*numbers.values()) == {1}


def bound(source):
    manifest = source.manifest()
    source.bind(manifest)
    return source


def test_views_of_a_fused_matrix_are_sent_as_the_tensors_that_they_are() -> None:
    fused = torch.arange(12.0 * 4).reshape(12, 4)
    query, key, value = fused.split([6, 3, 3])
    source = bound(ShardedTensors({"q": query, "k": Shard(key, index=1, count=2), "v": Shard(value, index=1, count=2)}))
    assert [piece.block for piece in source.holdings(1, 2).pieces] == [
        Block.contiguous(0, 24),
        Block.contiguous(12, 12),
        Block.contiguous(12, 12),
    ]
    (span,) = source.spans(2, Block.contiguous(16, 4))
    assert span.tensor.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert torch.equal(source.read(2, Block.contiguous(16, 4)), value[1])


def test_several_parts_of_one_tensor_are_read_each_from_its_own_memory() -> None:
    whole = torch.arange(40.0).reshape(8, 5)
    parts = [Shard(whole[rows : rows + 2].clone(), start=rows, whole=8) for rows in (0, 6)]
    source = bound(ShardedTensors({"w": parts}))
    for piece in source.holdings(0, 2).pieces:
        rows = slice(piece.block.offset // 5, piece.block.offset // 5 + 2)
        assert torch.equal(source.read(0, piece.block), whole[rows].flatten())
    with pytest.raises(ValueError, match=r"does not hold Block\(offset=15.*\) of tensor w float32 \[8, 5\]"):
        source.read(0, Block.contiguous(15, 5))


def test_what_is_contiguous_is_read_without_a_copy_and_what_is_not_in_the_order_of_the_whole() -> None:
    tensor = torch.arange(60.0).reshape(5, 4, 3)
    plain = bound(NamedTensors({"w": tensor}))
    assert plain.read(0, Block.contiguous(12, 12)).data_ptr() == tensor[1].data_ptr()
    turned = bound(NamedTensors({"w": tensor.permute(2, 0, 1)}))
    expected = tensor.permute(2, 0, 1).flatten()
    for block in (Block.contiguous(0, 60), Block.contiguous(7, 9), Block(1, 3, 2, 20)):
        index = [block.offset + row * block.stride + column for row in range(block.rows) for column in range(block.run)]
        assert torch.equal(turned.read(0, block), expected[index])
    assert turned.spans(0, Block.contiguous(0, 60)) is None


def test_a_tensor_without_dimensions_or_without_elements_can_be_sent() -> None:
    source = bound(NamedTensors({"scalar": torch.tensor(3.0), "none": torch.empty(0, 4)}))
    (piece,) = source.holdings(0, 1).pieces
    assert (piece.source, source.read(0, piece.block).tolist()) == (0, [3.0])


def test_reading_casts_to_the_wanted_type() -> None:
    source = bound(NamedTensors({"w": torch.tensor([1.0, 2.5, -3.0], requires_grad=True)}))
    read = source.read(0, Block.contiguous(1, 2), torch.bfloat16)
    assert read.tolist() == [2.5, -3.0]
    assert (read.dtype, read.requires_grad) == (torch.bfloat16, False)


def test_addresses_tell_tensors_that_were_replaced_from_those_written_in_place() -> None:
    tensors = {"w": torch.zeros(4)}
    source = bound(NamedTensors(tensors))
    before = source.addresses()
    tensors["w"].add_(1)
    source.bind(source.manifest())
    assert source.addresses() == before
    kept, tensors["w"] = tensors["w"], torch.zeros(4)
    source.bind(source.manifest())
    assert source.addresses() != before
    assert kept is not tensors["w"]


def test_a_part_cannot_be_broadcast_as_a_whole() -> None:
    source = bound(ShardedTensors({"w": Shard(torch.zeros(2), count=2)}))
    with pytest.raises(ValueError, match=r"holds only a part of tensor w, .*transport to Auto or Layout"):
        list(source.whole())


def test_a_tensor_on_the_meta_device_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor w is on the meta device and holds no data"):
        NamedTensors({"w": torch.zeros(2, device="meta")}).manifest()
