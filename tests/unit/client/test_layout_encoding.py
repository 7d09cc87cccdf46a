"""Layouts and holdings as bytes: compact, canonical, and refused when they make no sense."""

import hashlib
import json
import struct
import time
import zlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.model_shapes import QWEN2_7B, QWEN3_30B_A3B, TINY_DENSE, TINY_MIXTURE, model_layout
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout import (
    NOT_COMPARED,
    Block,
    Detour,
    Holdings,
    Layout,
    Parameter,
    Piece,
    Placement,
    build_layout,
    checkpoint_layout,
    shape_digest,
    whole_holdings,
)

MANIFEST = Manifest(
    tensors=(
        TensorSpec(name="a", dtype="float32", shape=(4, 6)),
        TensorSpec(name="b", dtype="float32", shape=(12,)),
        TensorSpec(name="c", dtype="bfloat16", shape=(3,)),
        TensorSpec(name="empty", dtype="bfloat16", shape=(0, 3)),
    )
)
WHOLE = Block.contiguous(0, 24)
HALF = Block(0, 4, 3, 6)
PARAMETERS = (Parameter("live", "bfloat16", 40), Parameter("c", "bfloat16", 3, temporary=True))
PLACEMENTS = (
    Placement(0, HALF, 0, Block.contiguous(0, 12)),
    Placement(1, Block.contiguous(0, 12), 0, Block.contiguous(12, 12)),
    Placement(2, Block.contiguous(0, 3), 1, Block.contiguous(0, 3)),
)


def layout(**changes) -> Layout:
    content = {
        "manifest_digest": MANIFEST.digest(),
        "parameters": PARAMETERS,
        "placements": PLACEMENTS,
        "detours": (Detour(2, "computed"),),
        "shape": "s",
    }
    return Layout(**(content | changes))


@pytest.mark.parametrize("shape", [TINY_DENSE, TINY_MIXTURE, QWEN2_7B])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_layout_survives_its_bytes(shape, rank, ranks) -> None:
    _, made = model_layout(shape, rank=rank, ranks=ranks)
    again = Layout.decode(made.encode())
    assert again == made
    assert (again.digest, again.encode()) == (made.digest, made.encode())


def test_every_tensor_of_a_checkpoint_layout_is_a_detour_with_a_temporary_of_its_own() -> None:
    made = checkpoint_layout(MANIFEST, "shape")
    assert Layout.decode(made.encode()) == made
    assert [(parameter.name, parameter.dtype, parameter.elements) for parameter in made.temporaries] == [
        (spec.name, spec.dtype, spec.elements) for spec in MANIFEST.tensors
    ]
    assert made.live == ()
    assert (made.placed_bytes, made.detoured_bytes, made.shape) == (0, MANIFEST.nbytes, "shape")
    assert made.reasons() == (f"4 tensors, a first: {NOT_COMPARED}",)


def test_the_bytes_of_a_layout_do_not_depend_on_the_order_in_which_it_was_found() -> None:
    found = {
        1: Placement(0, HALF, 0, Block.contiguous(0, 12)),
        2: Placement(1, Block.contiguous(0, 12), 0, Block.contiguous(12, 12)),
    }
    made = [
        build_layout(MANIFEST, PARAMETERS[:1], [found[each] for each in order], {2: "computed"}, "s")
        for order in ((1, 2), (2, 1))
    ]
    assert made[0] == made[1] == layout()
    assert made[0].encode() == made[1].encode()


def test_a_tensor_that_the_loader_copies_row_by_row_is_one_placement() -> None:
    rows = [Placement(0, Block.contiguous(6 * row, 6), 0, Block.contiguous(6 * row, 6)) for row in range(4)]
    assert build_layout(MANIFEST, PARAMETERS[:1], rows, {}, "").placements == (Placement(0, WHOLE, 0, WHOLE),)


def test_different_contents_have_different_digests() -> None:
    made = [
        layout(),
        layout(shape="t"),
        layout(manifest_digest="other"),
        layout(detours=(Detour(2, "packed"),)),
        layout(parameters=(Parameter("live", "float16", 40), PARAMETERS[1])),
        layout(placements=(Placement(0, HALF, 0, Block(0, 6, 2, 2)), *PLACEMENTS[2:])),
        layout(placements=(Placement(0, HALF, 0, Block(0, 6, 2, 4)), *PLACEMENTS[2:])),
    ]
    assert len({each.digest for each in made}) == len(made)


def test_bytes_are_counted_as_they_are_received() -> None:
    assert (layout().placed_bytes, layout().detoured_bytes) == (24 * 2, 3 * 2)


def test_the_commonest_reasons_come_first_and_name_a_tensor() -> None:
    made = build_layout(MANIFEST, (), (), {0: "packed", 1: "computed", 3: "packed"}, "")
    assert made.reasons() == ("2 tensors, a first: packed", "b: computed")
    assert made.reasons(limit=1) == ("2 tensors, a first: packed",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": (Parameter("live", "bf16", 40), PARAMETERS[1])}, "'bf16': dtype must be one of"),
        ({"parameters": (Parameter("live", "bfloat16", -1), PARAMETERS[1])}, "-1 elements"),
        ({"parameters": PARAMETERS[:1]}, "the last 1 must be temporary"),
        ({"parameters": ()}, "0 parameters cannot hold a temporary for each of 1 detours"),
        ({"parameters": (PARAMETERS[0], PARAMETERS[0], PARAMETERS[1])}, "names these parameters more than once: live"),
        ({"detours": ()}, "the last 0 must be temporary"),
        ({"detours": (Detour(1, "computed"),)}, "temporary c does not take tensor 1 whole"),
        ({"detours": (Detour(-1, "computed"),)}, "detours must have ascending sources from 0 on; -1 comes after -1"),
        ({"placements": PLACEMENTS[:2]}, "temporary c does not take tensor 2 whole"),
        ({"placements": (Placement(0, HALF, 7, HALF),)}, "placement 0 puts tensor 0 into parameter 7 of 2"),
        ({"placements": (Placement(-1, HALF, 0, HALF),)}, "placement 0 puts tensor -1 into parameter 0 of 2"),
        ({"placements": (Placement(0, HALF, 0, Block.contiguous(30, 12)),)}, "leaves live of 40 elements"),
        ({"placements": (Placement(0, HALF, 0, WHOLE),)}, "12 elements of tensor 0 cannot fill 24 of live"),
        (
            {"placements": (PLACEMENTS[1], PLACEMENTS[0], PLACEMENTS[2])},
            "placement 1, into live from element 0, does not come after",
        ),
        (
            {"placements": (Placement(0, HALF, 0, Block(0, 4, 3, 8)), Placement(1, HALF, 0, Block(2, 4, 3, 8)))},
            "two placements overlap in live",
        ),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        layout(**changes)


@pytest.mark.parametrize(
    ("placements", "detours", "words"),
    [
        ([Placement(4, HALF, 0, HALF)], {}, "tensor 4; the manifest has 4"),
        ([Placement(1, HALF, 0, HALF)], {}, "of b, which has 12 elements"),
        ([], {4: "computed"}, "tensor 4 cannot take a detour; the manifest has 4"),
    ],
)
def test_a_layout_takes_only_what_the_manifest_has(placements, detours, words) -> None:
    with pytest.raises(ValueError, match=words):
        build_layout(MANIFEST, PARAMETERS[:1], placements, detours, "")


def test_a_layout_is_of_one_manifest() -> None:
    layout().check(MANIFEST)
    with pytest.raises(ValueError, match="the layout is of manifest"):
        layout().check(Manifest(tensors=MANIFEST.tensors[:3]))
    with pytest.raises(
        ValueError, match="temporary c of 3 elements of float16 cannot take c, which has 3 elements of bfloat16"
    ):
        layout(parameters=(PARAMETERS[0], Parameter("c", "float16", 3, temporary=True))).check(MANIFEST)


def parts_of(data: bytes) -> tuple[bytes, dict, list[int]]:
    kind, header, body = zlib.decompress(data).split(b"\n", 2)
    return kind, json.loads(header), list(struct.unpack(f"<{len(body) // 8}q", body))


def as_bytes(kind: bytes, header: dict, numbers: list[int]) -> bytes:
    body = struct.pack(f"<{len(numbers)}q", *numbers)
    return zlib.compress(b"\n".join([kind, json.dumps(header, sort_keys=True, separators=(",", ":")).encode(), body]))


def test_the_digest_is_of_the_canonical_bytes() -> None:
    data = layout().encode()
    assert layout().digest == hashlib.sha256(zlib.decompress(data)).hexdigest()
    assert as_bytes(*parts_of(data)) == zlib.compress(zlib.decompress(data))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: b"", "end in the middle of the compressed stream"),
        (lambda data: data[:-5], "end in the middle of the compressed stream"),
        (lambda data: data + b"more", "4 bytes follow the end"),
        (lambda data: b"layout" + data, "cannot be decompressed"),
        (
            lambda data: zlib.compress(b"something else"),
            "expected 'rolloutfleet layout 1'; the bytes begin with b'something else'",
        ),
        (lambda data: whole_holdings(MANIFEST).encode(), "expected 'rolloutfleet layout 1'"),
    ],
)
def test_bytes_that_are_no_layout_are_refused(spoil, words) -> None:
    with pytest.raises(ValueError, match=words):
        Layout.decode(spoil(layout().encode()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placements": 2}, "columns of 24 numbers take 192 bytes; there are 272"),
        ({"placements": -1}, "placements"),
        ({"names": ["live", "c", "d"]}, "3 parameters have 2 dtypes"),
        ({"names": ["live", 3]}, "names.1"),
        ({"reasons": []}, "a detour's reason is not one of the 0 that are listed"),
        ({"extra": 1}, "extra"),
    ],
)
def test_headers_that_do_not_fit_the_columns_are_refused(change, words) -> None:
    kind, header, numbers = parts_of(layout().encode())
    with pytest.raises(ValueError, match=words):
        Layout.decode(as_bytes(kind, header | change, numbers))


def test_a_number_that_makes_no_block_is_refused_with_its_entry() -> None:
    kind, header, numbers = parts_of(layout().encode())
    lengths = [2, 1, 1, *[3] * 10]
    runs = sum(lengths[:7])
    assert list(accumulate(numbers[runs : runs + 3])) == [3, 12, 3]
    numbers[runs + 1] = -3
    with pytest.raises(ValueError, match="rolloutfleet layout 1: entry 1: block of 1 runs of 0 elements"):
        Layout.decode(as_bytes(kind, header, numbers))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_bytes_are_refused_or_mean_another_layout(place, flipped) -> None:
    data = bytearray(zlib.decompress(layout().encode()))
    data[place % len(data)] ^= flipped
    try:
        read = Layout.decode(zlib.compress(bytes(data)))
    except ValueError:
        return
    assert read.digest != layout().digest


def test_a_mixture_of_30b_is_a_few_kilobytes_and_read_at_once() -> None:
    manifest, made = model_layout(QWEN3_30B_A3B)
    assert (len(manifest.tensors), len(made.placements)) == (18867, 18867)
    assert made.placed_bytes == manifest.nbytes == 61_064_245_248
    data, detoured = made.encode(), checkpoint_layout(manifest).encode()
    assert len(data) < 20_000
    assert len(detoured) < 200_000
    began = time.process_time()
    assert Layout.decode(data) == made
    assert time.process_time() - began < 1


@st.composite
def pieces(draw):
    run = draw(st.integers(1, 9))
    return Piece(
        draw(st.integers(0, 5)),
        Block(draw(st.integers(0, 99)), draw(st.integers(1, 5)), run, run + draw(st.integers(0, 9))),
    )


@given(st.integers(0, 64), st.lists(pieces(), max_size=12), st.randoms())
def test_holdings_survive_their_bytes_whatever_the_order_of_pieces(rank, held, random) -> None:
    made = Holdings(rank, tuple(held))
    shuffled = [*held, *held[:2]]
    random.shuffle(shuffled)
    assert Holdings(rank, tuple(shuffled)) == made
    assert Holdings.decode(made.encode()) == made
    assert set(made.pieces) == set(held)


def test_whole_holdings_have_every_element_of_every_tensor() -> None:
    made = whole_holdings(MANIFEST, rank=3)
    assert made.rank == 3
    assert [(piece.source, piece.block) for piece in made.pieces] == [
        (0, Block.contiguous(0, 24)),
        (1, Block.contiguous(0, 12)),
        (2, Block.contiguous(0, 3)),
    ]
    made.check(MANIFEST)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece(4, Block.contiguous(0, 1)), "trainer rank 1 holds a piece of tensor 4; the manifest has 4"),
        (Piece(1, Block.contiguous(6, 7)), "of b, which has 12 elements"),
    ],
)
def test_holdings_outside_the_manifest_are_refused(piece, words) -> None:
    with pytest.raises(ValueError, match=words):
        Holdings(1, (piece,)).check(MANIFEST)


def test_shapes_are_equal_whatever_the_order_of_tensors_and_differ_in_every_part() -> None:
    tensors = [("a", "int8", (2, 3)), ("b", "int8", (6,))]
    same = shape_digest(reversed(tensors))
    assert shape_digest(tensors) == same == shape_digest((name, dtype, list(shape)) for name, dtype, shape in tensors)
    others = [
        [("a", "int8", (3, 2)), tensors[1]],
        [("a", "uint8", (2, 3)), tensors[1]],
        [("c", "int8", (2, 3)), tensors[1]],
    ]
    assert len({same, *map(shape_digest, others), shape_digest(tensors[:1])}) == 5
    with pytest.raises(ValueError, match="named more than once: a"):
        shape_digest([tensors[0], tensors[0]])
