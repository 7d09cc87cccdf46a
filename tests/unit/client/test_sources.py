"""What a trainer may hand over, what is refused by name before anything is sent, and where the parts of a tensor lie."""

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout.blocks import Block
from rolloutfleet.sources import NamedTensors, Shard, ShardedTensors, source_of
from rolloutfleet.sources.merging import merge_manifests
from rolloutfleet.sources.mesh import Cut, indices_of
from rolloutfleet.sources.regions import Region, row_major


@dataclass(frozen=True)
class FakeTensor:
    """Has of a tensor what a manifest needs."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "torch.float32"

    def detach(self) -> "FakeTensor":
        return self


class Module:
    """Has of an nn.Module what is asked of one."""

    def __init__(self, parameters: dict[str, FakeTensor]) -> None:
        self._parameters = parameters

    def named_parameters(self):
        return iter(self._parameters.items())


class Sharded(FakeTensor):
    """Has of a DTensor what tells it apart."""

    def full_tensor(self) -> None: ...


@pytest.mark.row("B11")
@pytest.mark.row("A37")
@pytest.mark.parametrize(
    "form", [Module, dict, lambda parameters: list(parameters.items())], ids=["module", "mapping", "pairs"]
)
def test_modules_mappings_and_pairs_give_names_dtypes_and_shapes_in_order(form) -> None:
    tensors = NamedTensors(form({"b.weight": FakeTensor((4,), "torch.bfloat16"), "a.weight": FakeTensor()}))
    manifest = tensors.manifest()
    assert [(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors] == [
        ("b.weight", "bfloat16", (4,)),
        ("a.weight", "float32", (2, 3)),
    ]
    tensors.bind(manifest)
    assert [spec for spec, _ in tensors.whole()] == list(manifest.tensors)


def test_a_manifest_that_still_describes_the_tensors_is_given_back_itself() -> None:
    known = NamedTensors({"w": FakeTensor()}).manifest()
    assert NamedTensors({"w": FakeTensor()}).manifest(known) is known
    assert NamedTensors({"w": FakeTensor((3, 3))}).manifest(known) is not known
    assert NamedTensors({"w": FakeTensor(), "b": FakeTensor()}).manifest(known) is not known


def test_a_generator_is_refused_because_tensors_are_read_twice() -> None:
    with pytest.raises(TypeError, match="tensors is a generator, which can be read only once; pass the module itself"):
        NamedTensors((name, FakeTensor()) for name in "ab")


def test_something_else_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"tensors is a int; pass an nn\.Module, a mapping"):
        source_of(5, team=False)


@pytest.mark.row("B11")
@pytest.mark.row("B12")
@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            [("w", FakeTensor(dtype="torch.complex64"))],
            "tensor w has dtype complex64; those that can be sent are bfloat16",
        ),
        (
            [("w", FakeTensor()), ("w", FakeTensor())],
            "these tensors cannot be sent: manifest names these tensors more than once: w",
        ),
        ([], "these tensors cannot be sent"),
    ],
    ids=["dtype", "repeated", "none"],
)
def test_tensors_that_cannot_be_sent_are_named(tensors, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        NamedTensors(tensors).manifest()


def test_a_sharded_tensor_without_a_team_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"tensor w is sharded .* connect with team= .* or gather it first"):
        source_of({"w": Sharded()}, team=False).manifest()


@pytest.mark.row("A37")
def test_tensors_that_changed_since_the_manifest_are_named() -> None:
    tensors = {"a": FakeTensor(), "b": FakeTensor()}
    named = NamedTensors(tensors)
    manifest = named.manifest()
    tensors["b"] = FakeTensor((3, 3))
    with pytest.raises(
        ValueError, match=r"tensor 1 was b float32 \[2, 3\] when the refit began and is b float32 \[3, 3\] now"
    ):
        named.bind(manifest)
    del tensors["b"]
    with pytest.raises(ValueError, match=r"only 1 of 2 tensors came; the next is b float32 \[2, 3\]"):
        named.bind(manifest)
    tensors |= {"b": FakeTensor(), "c": FakeTensor()}
    with pytest.raises(ValueError, match="tensor c came after the 2 that the manifest names"):
        named.bind(manifest)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dim": 2}, "dim is 2, and the tensor has 2 dimensions"),
        ({"index": 4, "count": 4}, "index is 4; of 4 parts it must be 0 to 3"),
        ({"start": 1}, "start is 1 and whole is None"),
        ({"start": 1, "whole": 8, "count": 2}, "give start and whole, or index and count"),
        ({"start": 7, "whole": 8}, "a part of 2 at 7 does not lie within the whole size of 8"),
    ],
)
def test_a_shard_that_contradicts_itself_is_refused(fields, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Shard(FakeTensor(), **fields)


def test_shards_describe_the_whole_tensor() -> None:
    table = ShardedTensors(
        {
            "column": Shard(FakeTensor((4, 8)), dim=1, index=1, count=2),
            "uneven": Shard(FakeTensor((3, 8)), dim=0, start=8, whole=11),
            "several": [Shard(FakeTensor((2, 5)), start=0, whole=8), Shard(FakeTensor((2, 5)), start=6, whole=8)],
            "replicated": FakeTensor((7,)),
        }
    )
    shapes = {spec.name: spec.shape for spec in table.manifest().tensors}
    assert shapes == {"column": (4, 16), "uneven": (11, 8), "several": (8, 5), "replicated": (7,)}


def test_parts_of_one_tensor_that_disagree_are_refused() -> None:
    parts = [Shard(FakeTensor((2, 5)), start=0, whole=8), Shard(FakeTensor((2, 5)), start=2, whole=9)]
    with pytest.raises(ValueError, match=r"the parts of tensor w say that it is \[8, 5\] or \[9, 5\]"):
        ShardedTensors({"w": parts}).manifest()
    with pytest.raises(ValueError, match="tensor w holds no parts; give one Shard or several"):
        ShardedTensors({"w": []}).manifest()


def manifest_of(**shapes: tuple[int, ...]) -> Manifest:
    return Manifest(tensors=tuple(TensorSpec(name=name, dtype="int8", shape=shape) for name, shape in shapes.items()))


def test_the_manifest_of_a_team_names_what_any_rank_knows_once() -> None:
    merged = merge_manifests([manifest_of(a=(1,), b=(2,)), manifest_of(c=(3,), a=(1,))])
    assert [spec.name for spec in merged.tensors] == ["a", "b", "c"]
    first = manifest_of(a=(1,))
    assert merge_manifests([first, manifest_of(a=(1,))]) is first


def test_ranks_that_disagree_on_a_tensor_are_named() -> None:
    with pytest.raises(ValueError, match=r"tensor a is int8 \[2\] on trainer rank 1 and int8 \[1\] on rank 0"):
        merge_manifests([manifest_of(a=(1,)), manifest_of(a=(2,))])


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=3))
def test_the_cuts_of_all_ranks_share_out_every_index_once(size: int, meshes: list[tuple[int, int]]) -> None:
    ranks = product(*(range(count) for count, _ in meshes))
    held = [
        index
        for rank in ranks
        for indices in indices_of(
            size, [Cut(count, place, split) for (count, split), place in zip(meshes, rank, strict=True)]
        )
        for index in indices
    ]
    assert sorted(held) == list(range(size))


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """A box of a whole tensor whose axes lie in some order in local memory, with gaps."""
    whole = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    start = [draw(st.integers(0, size - 1)) for size in whole]
    shape = [draw(st.integers(1, size - begin)) for size, begin in zip(whole, start, strict=True)]
    step, strides = 1, [0] * len(whole)
    for axis in draw(st.permutations(range(len(whole)))) if draw(st.booleans()) else reversed(range(len(whole))):
        strides[axis] = step
        step *= shape[axis] + draw(st.sampled_from([0, 0, 0, 2]))
    return Region(tuple(whole), tuple(start), tuple(shape), tuple(strides))


def elements_of(block: Block) -> list[int]:
    return [block.offset + row * block.stride + column for row in range(block.rows) for column in range(block.run)]


def local_of(region: Region) -> dict[int, int]:
    """Local position by index in the whole tensor, element by element."""
    places = {}
    for index in product(*map(range, region.shape)):
        at = sum((i + s) * w for i, s, w in zip(index, region.start, row_major(region.whole), strict=True))
        places[at] = sum(i * stride for i, stride in zip(index, region.strides, strict=True))
    return places


@given(regions())
def test_the_pieces_of_a_box_are_its_elements(region: Region) -> None:
    assert sorted(at for block in region.pieces() for at in elements_of(block)) == sorted(local_of(region))


@given(regions(), st.data())
def test_a_block_is_found_in_local_memory_element_by_element_and_in_order(region: Region, data: st.DataObject) -> None:
    places = local_of(region)
    piece = data.draw(st.sampled_from(region.pieces()))
    row = data.draw(st.integers(0, piece.rows - 1))
    rows = data.draw(st.integers(1, piece.rows - row))
    column = data.draw(st.integers(0, piece.run - 1))
    run = data.draw(st.integers(1, piece.run - column))
    block = Block(piece.offset + row * piece.stride + column, rows, run, piece.stride)
    assert region.holds(block)
    located = region.locate(block)
    if located is None:
        assert region.strides[-1] != 1 or region.shape[-1] == 1
        return
    assert [at for part in located for at in elements_of(part)] == [places[at] for at in elements_of(block)]


@given(regions(), st.integers(0, 700), st.integers(1, 30))
def test_a_block_that_leaves_the_box_is_refused(region: Region, offset: int, run: int) -> None:
    assume(region.strides[-1] == 1 and not set(range(offset, offset + run)) <= set(local_of(region)))
    with pytest.raises(ValueError, match="does not lie in the box"):
        region.locate(Block.contiguous(offset, run))


def test_a_column_shard_is_one_block_on_both_sides() -> None:
    region = Region(whole=(1000, 96), start=(0, 48), shape=(1000, 48), strides=(48, 1))
    assert region.pieces() == (Block(48, 1000, 48, 96),)
    assert region.locate(Block(48 + 96 * 10, 500, 24, 96)) == (Block(480, 500, 24, 48),)
