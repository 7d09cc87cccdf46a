"""The algebra of blocks against lists and sets of element numbers, and against numpy's own views."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.layout import Block, block_of, first_overlap, overlap, pair, region, section, select, subtract
from rolloutfleet.layout.blocks import MAX_BLOCKS, join


def elements(*blocks: Block) -> list[int]:
    return [
        block.offset + row * block.stride + column
        for block in blocks
        for row in range(block.rows)
        for column in range(block.run)
    ]


@st.composite
def any_block(draw):
    run = draw(st.integers(1, 7))
    return Block(draw(st.integers(0, 40)), draw(st.integers(1, 6)), run, run + draw(st.integers(0, 9)))


@st.composite
def blocks_of_one_matrix(draw):
    """Two blocks of equal stride, as cuts of one matrix are; their runs may reach over its edge."""
    stride = draw(st.integers(2, 9))
    return tuple(
        Block(draw(st.integers(0, 30)), draw(st.integers(1, 6)), draw(st.integers(1, stride - 1)), stride)
        for _ in range(2)
    )


pairs_of_blocks = st.one_of(st.tuples(any_block(), any_block()), blocks_of_one_matrix())


@given(any_block())
def test_equal_elements_in_equal_order_make_equal_blocks(block: Block) -> None:
    listed = elements(block)
    assert (block.elements, block.end) == (len(listed), listed[-1] + 1)
    contiguous = listed == list(range(listed[0], listed[0] + len(listed)))
    assert block.is_contiguous == contiguous
    if contiguous:
        assert block == Block.contiguous(listed[0], len(listed)) == Block(listed[0], len(listed), 1, 1)


@pytest.mark.parametrize("numbers", [(-1, 1, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 2, 4, 3)])
def test_blocks_that_are_empty_overlap_themselves_or_begin_before_the_tensor_are_refused(numbers) -> None:
    with pytest.raises(ValueError, match="offset must be at least 0, rows and run at least 1"):
        Block(*numbers)


@st.composite
def views(draw):
    """A numpy view of 0..n-1 by slicing with steps, dropping and adding dimensions: offset, shape, strides and its elements in order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    view = np.arange(np.prod(shape)).reshape(shape)
    cuts = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        cuts.append(slice(start, draw(st.integers(start, size)), draw(st.sampled_from([1, 1, 1, 2, 3]))))
    view = view[tuple(cuts)]
    if draw(st.booleans()):
        view = view[np.newaxis]
    if draw(st.booleans()):
        view = np.swapaxes(view, 0, draw(st.integers(0, view.ndim - 1)))
    if draw(st.booleans()):
        view = np.broadcast_to(view, (draw(st.integers(1, 3)), *view.shape))
    offset = 0 if view.size == 0 else int(view.flat[0])
    return offset, view.shape, tuple(step // view.itemsize for step in view.strides), view.flatten().tolist()


@given(views())
def test_blocks_of_a_view_are_its_elements_in_row_major_order(view) -> None:
    offset, shape, strides, listed = view
    blocks = block_of(offset, shape, strides)
    if blocks is None:
        steps = [step for size, step in zip(shape, strides, strict=True) if size > 1]
        assert 0 < min(filter(None, steps)) < steps[-1]
    else:
        assert elements(*blocks) == listed


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "blocks"),
    [
        (0, (4, 8), (8, 1), [(0, 1, 32, 32)]),
        (4, (3, 4), (8, 1), [(4, 3, 4, 8)]),
        (0, (8, 6, 2), (24, 4, 1), [(0, 48, 2, 4)]),
        (3, (2, 2, 4), (40, 10, 1), [(3, 2, 4, 10), (43, 2, 4, 10)]),
        (5, (1, 7, 1), (99, 3, 50), [(5, 7, 1, 3)]),
        (1, (2, 3, 1), (30, 5, 1), [(1, 3, 1, 5), (31, 3, 1, 5)]),
        (7, (), (), [(7, 1, 1, 1)]),
        (0, (3,), (0,), [(0, 1, 1, 1)] * 3),
    ],
)
def test_views_become_as_few_blocks_as_their_dimensions_allow(offset, shape, strides, blocks) -> None:
    assert block_of(offset, shape, strides) == tuple(Block(*numbers) for numbers in blocks)


def test_views_without_elements_have_no_blocks() -> None:
    assert block_of(3, (4, 0), (9, 1)) == ()


def test_transposed_views_and_those_of_too_many_blocks_have_none() -> None:
    assert block_of(0, (4, 8), (1, 4)) is None
    assert block_of(0, (MAX_BLOCKS, 2, 2), (100, 10, 1)) is not None
    assert block_of(0, (MAX_BLOCKS + 1, 2, 2), (100, 10, 1)) is None


def test_a_view_has_a_stride_for_each_dimension() -> None:
    with pytest.raises(ValueError, match=r"view of shape \[2, 3\] has strides \[3\]"):
        block_of(0, (2, 3), (3,))


@given(st.data())
def test_a_region_is_numpys_slice(data) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    starts = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    cut = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    assert elements(*region(shape, starts, sizes)) == cut.flatten().tolist()


@pytest.mark.parametrize(
    ("starts", "sizes", "words"), [((0, 2), (4, 2), "leaves a tensor"), ((0,), (4,), "not the dimensions of shape")]
)
def test_regions_outside_the_tensor_are_refused(starts, sizes, words) -> None:
    with pytest.raises(ValueError, match=words):
        region((4, 3), starts, sizes)


@given(any_block(), st.data())
def test_a_section_is_a_slice_of_the_blocks_elements(block: Block, data) -> None:
    start = data.draw(st.integers(0, block.elements))
    count = data.draw(st.integers(0, block.elements - start))
    pieces = section(block, start, count)
    assert elements(*pieces) == elements(block)[start : start + count]
    assert len(pieces) <= 3
    with pytest.raises(ValueError, match="has no elements"):
        section(block, start, block.elements - start + 1)


@given(any_block(), st.data())
def test_selecting_positions_is_indexing(block: Block, data) -> None:
    listed = elements(block)
    run = data.draw(st.integers(1, len(listed)))
    stride = data.draw(st.one_of(st.integers(run, run + 9), st.sampled_from([block.run, 2 * block.run, 3 * block.run])))
    rows = data.draw(st.integers(1, 4))
    positions = Block(data.draw(st.integers(0, 9)), rows, run, max(stride, run))
    if positions.end > len(listed):
        with pytest.raises(ValueError, match="has no position"):
            select(block, positions)
    else:
        assert elements(*select(block, positions)) == [listed[position] for position in elements(positions)]


def test_positions_that_reach_over_the_ends_of_runs_are_selected_run_by_run() -> None:
    chosen = select(Block(0, 4, 2, 5), Block(1, 2, 2, 4))
    assert elements(*chosen) == [1, 5, 11, 15]
    assert select(Block(0, 4, 3, 5), Block(1, 2, 2, 6)) == (Block(1, 2, 2, 10),)


@given(pairs_of_blocks)
def test_an_overlap_is_what_both_have_each_once_with_its_place_in_the_first(both) -> None:
    block, other = both
    shared = overlap(block, other)
    found = [element for piece, _ in shared for element in elements(piece)]
    assert sorted(found) == sorted(set(elements(block)) & set(elements(other)))
    listed = elements(block)
    for piece, positions in shared:
        assert [listed[position] for position in elements(positions)] == elements(piece)


@given(pairs_of_blocks)
def test_a_difference_is_what_only_the_first_has_each_once(both) -> None:
    block, other = both
    rest = [element for piece in subtract(block, other) for element in elements(piece)]
    assert sorted(rest) == sorted(set(elements(block)) - set(elements(other)))


def test_cuts_of_one_matrix_overlap_in_single_blocks() -> None:
    columns, rows = Block(4, 100, 6, 16), Block.contiguous(16 * 10, 16 * 20)
    assert overlap(columns, rows) == ((Block(164, 20, 6, 16), Block.contiguous(60, 120)),)
    assert overlap(rows, columns) == ((Block(164, 20, 6, 16), Block(4, 20, 6, 16)),)
    assert overlap(columns, Block(8, 100, 8, 16)) == ((Block(8, 100, 2, 16), Block(4, 100, 2, 6)),)


def cut_up(blocks: list[Block], cuts: list[int]) -> list[Block]:
    pieces: list[Block] = []
    for block in blocks:
        edges = sorted({0, block.elements, *(cut for cut in cuts if cut < block.elements)})
        for start, stop in pairwise(edges):
            pieces += section(block, start, stop - start)
    return pieces


@given(st.lists(any_block(), max_size=4), st.lists(st.integers(1, 30), max_size=6), st.data())
def test_pairs_correspond_element_by_element(destinations, cuts, data) -> None:
    total = sum(block.elements for block in destinations)
    sources = cut_up([Block.contiguous(7, total)], cuts) if total else []
    cut_sources = data.draw(st.permutations(sources))
    pairs = pair(cut_sources, destinations)
    listed = [
        each for source, destination in pairs for each in zip(elements(source), elements(destination), strict=True)
    ]
    assert listed == list(zip(elements(*cut_sources), elements(*destinations), strict=True))


def test_sides_of_different_size_are_no_pair() -> None:
    with pytest.raises(ValueError, match="4 source elements cannot fill 5 destination elements"):
        pair([Block.contiguous(0, 4)], [Block.contiguous(0, 5)])


@given(any_block(), st.integers(-1, 1), st.integers(1, 4), st.integers(-1, 1), st.integers(-1, 1))
def test_joined_blocks_are_one_after_the_other(before: Block, moved, rows, wider, farther) -> None:
    run, stride = max(1, before.run + wider), max(before.stride + farther, before.run + wider, 1)
    after = Block(before.offset + before.rows * before.stride + moved, rows, run, stride)
    joined = join(before, after)
    if joined is not None:
        assert elements(joined) == elements(before, after)
    elif before.end == after.offset:
        assert not (before.is_contiguous and after.is_contiguous)


@given(any_block(), st.data())
def test_sections_of_whole_rows_join_to_the_block_again(block: Block, data) -> None:
    row = data.draw(st.integers(1, block.rows)) if block.rows > 1 else 1
    parts = section(block, 0, row * block.run) + section(block, row * block.run, block.elements - row * block.run)
    if len(parts) == 2 and block.rows > 2:
        assert join(*parts) == block


@given(st.lists(any_block(), max_size=6))
def test_the_first_overlap_is_found_exactly_when_elements_repeat(blocks) -> None:
    blocks.sort(key=lambda block: block.offset)
    listed = elements(*blocks)
    clash = first_overlap(blocks)
    assert (clash is not None) == (len(set(listed)) < len(listed))
    if clash:
        assert set(elements(clash[0])) & set(elements(clash[1]))
