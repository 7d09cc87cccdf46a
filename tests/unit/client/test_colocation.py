"""What trainer ranks show in shared memory is derived alike on both sides, and every part of a program is found in it."""

import pytest

pytest.importorskip("torch")

from rolloutfleet.colocation import Showcase, ShownPiece
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import Holdings, Piece
from rolloutfleet.layout.layout import Layout, Parameter, Placement


def layout(dtype: str, *sources: int) -> Layout:
    placements = tuple(
        Placement(source, Block.contiguous(0, 8), 0, Block.contiguous(8 * index, 8))
        for index, source in enumerate(sources)
    )
    return Layout("manifest", (Parameter("flat", dtype, 8 * len(sources)),), placements, (), "shape")


def test_a_piece_is_shown_once_in_each_type_that_a_layout_takes() -> None:
    rows, columns = Block.contiguous(0, 4), Block(1, 2, 2, 4)
    holdings = Holdings(1, (Piece(0, rows), Piece(1, columns), Piece(2, rows)))
    showcase = Showcase([layout("float32", 0), layout("bfloat16", 0, 1)], holdings)
    assert showcase.pieces == (
        ShownPiece(0, rows, "bfloat16"),
        ShownPiece(0, rows, "float32"),
        ShownPiece(1, columns, "bfloat16"),
    )


def test_a_part_is_found_in_the_flat_piece_that_has_it() -> None:
    showcase = Showcase(
        [layout("float32", 0)], Holdings(0, (Piece(0, Block(1, 2, 2, 4)), Piece(0, Block.contiguous(3, 1))))
    )
    assert showcase.find(0, Block(2, 2, 1, 4), "float32") == (0, ((Block(2, 2, 1, 4), Block(1, 2, 1, 2)),))
    with pytest.raises(ValueError, match=r"trainer rank 0 shows no piece that has Block.* of tensor 0 as float32"):
        showcase.find(0, Block.contiguous(0, 2), "float32")
    with pytest.raises(ValueError, match="of tensor 0 as float16"):
        showcase.find(0, Block(1, 2, 2, 4), "float16")
