"""Programs against the layouts that they carry: executed over small arrays, every element once, from a rank that has it."""

import random
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.model_shapes import QWEN2_7B, QWEN3_30B_A3B, TINY_DENSE, TINY_MIXTURE, model_layout
from fakes.program_runs import NOTHING, evaluate, execute, indices, random_sources
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout import (
    ALIGNMENT,
    Block,
    Holdings,
    Layout,
    Parameter,
    Piece,
    Placement,
    Program,
    build_layout,
    checkpoint_layout,
    pair,
    plan_program,
    region,
    whole_holdings,
)

MEGABYTE = 1 << 20
INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def chunk(shape, dim: int, index: int, count: int) -> tuple[Block, ...]:
    """The index-th piece of ``torch.chunk``: equal ones of the rounded up size, the last ones smaller or empty."""
    size = -(-shape[dim] // count)
    start = min(index * size, shape[dim])
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = start, min(size, shape[dim] - start)
    return region(shape, starts, sizes)


def sharded(manifest: Manifest, ranks: int, dims) -> list[Holdings]:
    """One holding a rank; ``dims`` gives each tensor's cut dimension, or None where every rank has it whole."""
    return [
        Holdings(
            rank,
            tuple(
                Piece(source, block)
                for source, spec in enumerate(manifest.tensors)
                if spec.elements
                for block in (
                    chunk(spec.shape, dims(spec), rank, ranks)
                    if dims(spec) is not None
                    else [Block.contiguous(0, spec.elements)]
                )
            ),
        )
        for rank in range(ranks)
    ]


def rows(spec: TensorSpec) -> int:
    return 0


def columns(spec: TensorSpec) -> int:
    return len(spec.shape) - 1


def rows_of_matrices(spec: TensorSpec) -> int | None:
    return 0 if len(spec.shape) > 1 else None


@st.composite
def manifests(draw):
    specs = []
    for index in range(draw(st.integers(1, 5))):
        shape = draw(
            st.lists(st.integers(0, 6) if draw(st.integers(0, 9)) == 0 else st.integers(1, 6), min_size=1, max_size=3)
        )
        specs.append(
            TensorSpec(name=f"t{index}", dtype=draw(st.sampled_from(list(INTEGERS.values()))), shape=tuple(shape))
        )
    return Manifest(tensors=tuple(specs))


@st.composite
def layouts(draw, manifest: Manifest):
    """Parameters of boxes of random tensors, one after another, interleaved by columns, or with gaps; some tensors on a detour."""
    parameters: list[Parameter] = []
    placements: list[Placement] = []
    for number in range(draw(st.integers(0, 4))):
        end = 0
        for _ in range(draw(st.integers(1, 4))):
            source = draw(st.integers(0, len(manifest.tensors) - 1))
            shape = manifest.tensors[source].shape
            starts = [draw(st.integers(0, size)) for size in shape]
            sizes = [draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
            taken = region(shape, starts, sizes)
            count = sum(block.elements for block in taken)
            if not count:
                continue
            end += draw(st.sampled_from([0, 0, 0, 1, 3]))
            run = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
            copies = draw(st.sampled_from([1, 1, 2]))
            gap = draw(st.integers(0, 2)) if copies == 1 else (copies - 1) * run
            for copy in range(copies):
                into = Block(end + copy * run, count // run, run, run + gap)
                placements += [Placement(source, one, number, other) for one, other in pair(taken, [into])]
            end = into.end
        parameters.append(
            Parameter(f"p{number}", INTEGERS[draw(st.sampled_from(list(INTEGERS)))], end + draw(st.integers(0, 2)))
        )
    detours = draw(st.sets(st.integers(0, len(manifest.tensors) - 1)))
    return build_layout(manifest, parameters, placements, dict.fromkeys(detours, "computed"), "")


@st.composite
def holdings(draw, manifest: Manifest):
    """For each tensor one way to be spread over the ranks: whole on some, cut along a dimension, both, or in two copies of shards."""
    ranks = draw(st.integers(1, 4))
    numbers = draw(st.permutations(range(ranks)))
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for source, spec in enumerate(manifest.tensors):
        if not spec.elements:
            continue
        way = draw(st.sampled_from(["whole", "cut", "both", "twice", "two ways"]))
        if way in {"whole", "both"}:
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                pieces[rank].append(Piece(source, Block.contiguous(0, spec.elements)))
        for _ in range(2 if way == "two ways" else 1 if way != "whole" else 0):
            dim = draw(st.integers(0, len(spec.shape) - 1))
            count = max(1, ranks // 2) if way == "twice" else ranks
            for rank in range(ranks):
                pieces[rank] += [Piece(source, block) for block in chunk(spec.shape, dim, rank % count, count)]
    return [Holdings(rank, tuple(pieces[rank])) for rank in numbers]


@st.composite
def cases(draw):
    manifest = draw(manifests())
    return (
        manifest,
        draw(layouts(manifest)),
        draw(holdings(manifest)),
        draw(st.sampled_from([16, 40, 64, 300, 1 << 20])),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_executing_a_program_gives_what_the_layout_says(case) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    sources = random_sources(manifest, seed=1)
    for wanted, found in zip(evaluate(layout, sources), execute(program, layout, held, sources), strict=True):
        assert wanted.tobytes() == found.tobytes()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_element_of_every_placement_is_sent_once_in_payloads_within_the_limit(case) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    sent = Counter(
        (part.source, int(source), part.parameter, int(element))
        for message in program.messages
        for part in message.parts
        for source, element in zip(indices(part.source_block), indices(part.block), strict=True)
    )
    wanted = Counter(
        (placement.source, int(source), placement.parameter, int(element))
        for placement in layout.placements
        for source, element in zip(indices(placement.source_block), indices(placement.block), strict=True)
    )
    assert sent == wanted
    assert all(0 < message.nbytes <= limit for message in program.messages)
    assert program.nbytes == sum(message.nbytes for message in program.messages)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_payloads_are_direct_exactly_when_they_are_one_run_of_one_parameter(case) -> None:
    manifest, layout, held, limit = case
    for message in plan_program(manifest, layout, held, limit).messages:
        in_a_row = len({part.parameter for part in message.parts}) == 1 and all(
            part.block.is_contiguous for part in message.parts
        )
        in_a_row = in_a_row and all(one.block.end == other.block.offset for one, other in pairwise(message.parts))
        assert message.direct == in_a_row
        ends = [
            part.position + part.block.elements * layout.parameters[part.parameter].itemsize for part in message.parts
        ]
        starts = [part.position for part in message.parts]
        if message.direct:
            assert starts == [0, *ends[:-1]]
            assert message.nbytes == ends[-1]
        else:
            aligned = [-(-end // ALIGNMENT) * ALIGNMENT for end in ends]
            assert starts == [0, *aligned[:-1]]
            assert message.nbytes == aligned[-1]


@settings(max_examples=50, deadline=None)
@given(cases(), st.randoms())
def test_a_program_is_the_same_whatever_the_order_of_holdings_and_on_the_other_side_of_the_wire(case, shuffle) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    sent = [Holdings.decode(each.encode()) for each in held]
    shuffle.shuffle(sent)
    again = plan_program(
        Manifest.model_validate_json(manifest.model_dump_json()), Layout.decode(layout.encode()), sent, limit
    )
    assert again == program


def folded(values: np.ndarray, word: int, block: Block, itemsize: int, at: Block) -> tuple[int, int]:
    """The two sums over a block's words, weighed by their places in the whole source tensor."""
    words = values[indices(block)].view(f"<i{word}").astype(object)
    places = (indices(at)[:, None] * itemsize + np.arange(0, itemsize, word)) // word if itemsize >= word else None
    if places is None:
        places = indices(at)[:: word // itemsize] * itemsize // word
    return int(words.sum()), int((words * (places.reshape(-1) + 1).astype(object)).sum())


@settings(max_examples=100, deadline=None)
@given(cases())
def test_units_let_both_sides_sum_the_same_words_and_whole_tensors_add_up(case) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    sources = random_sources(manifest, seed=2)
    parameters = evaluate(layout, sources)
    sent, received = Counter(), Counter()
    uncast = set(range(len(sources)))
    for part in (part for message in program.messages for part in message.parts):
        target, word = parameters[part.parameter], program.units[part.source]
        cast = sources[part.source].astype(target.dtype)
        for side in (part.source_block, part.block):
            assert all(n * target.itemsize % word == 0 for n in (side.offset, side.run, side.stride))
        for block, values, sums in (
            (part.source_block, cast, sent),
            (part.block, target, received),
        ):
            for order, value in enumerate(folded(values, word, block, target.itemsize, part.source_block)):
                sums[part.source, order] += value
        if target.dtype != sources[part.source].dtype:
            uncast.discard(part.source)
    assert sent == received
    for source in uncast:
        if program.whole[source] and sources[source].size:
            block = Block.contiguous(0, sources[source].size)
            whole = folded(sources[source], program.units[source], block, sources[source].itemsize, block)
            assert (sent[source, 0], sent[source, 1]) == whole


@settings(max_examples=100, deadline=None)
@given(cases())
def test_coverage_counts_what_parameters_take_and_tells_tensors_taken_once(case) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    for source, spec in enumerate(manifest.tensors):
        taken = [int(n) for each in layout.placements if each.source == source for n in indices(each.source_block)]
        assert program.placed[source] == len(taken)
        assert program.whole[source] == (sorted(taken) == list(range(spec.elements)))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_temporaries_become_whole_in_the_order_told(case) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    assert sorted(done.parameter for done in program.completions) == list(
        range(len(layout.live), len(layout.parameters))
    )
    assert [done.message for done in program.completions] == sorted(done.message for done in program.completions)
    for done in program.completions:
        assert layout.parameters[done.parameter].name == manifest.tensors[done.source].name
        carrying = [i for i, m in enumerate(program.messages) if any(p.parameter == done.parameter for p in m.parts)]
        assert done.message == max(carrying, default=-1)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_each_senders_messages_follow_the_parameters(case) -> None:
    manifest, layout, held, limit = case
    program = plan_program(manifest, layout, held, limit)
    told: list[int] = []
    for rank in {message.sender for message in program.messages}:
        own = program.sent_by(rank)
        assert all(message.sender == rank for _, message in own)
        assert [program.messages[index] for index, _ in own] == [message for _, message in own]
        firsts = [(message.parts[0].parameter, message.parts[0].block.offset) for _, message in own]
        assert firsts == sorted(firsts)
        told += [index for index, _ in own]
    assert sorted(told) == list(range(len(program.messages)))


@pytest.mark.parametrize("shape", [TINY_DENSE, TINY_MIXTURE])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cut", [rows, columns, rows_of_matrices])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_tensor_parallel_ranks_get_their_slices_from_sharded_trainers(shape, ranks, cut, trainers) -> None:
    for rank in range(ranks):
        manifest, layout = model_layout(shape, "int16", rank, ranks)
        held = sharded(manifest, trainers, cut)
        program = plan_program(manifest, layout, held, 256)
        sources = random_sources(manifest, seed=3)
        found = execute(program, layout, held, sources)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in evaluate(layout, sources)]
        by_name = {p.name: each for p, each in zip(layout.parameters, found, strict=True)}
        source = {spec.name: each.reshape(spec.shape) for spec, each in zip(manifest.tensors, sources, strict=True)}
        at = "model.layers.1.self_attn"
        fused = [np.split(source[f"{at}.{name}_proj.weight"], ranks)[rank] for name in "qkv"]
        assert by_name[f"{at}.qkv_proj.weight"].tobytes() == np.concatenate(fused).tobytes()
        output = np.split(source[f"{at}.o_proj.weight"], ranks, axis=1)[rank]
        assert by_name[f"{at}.o_proj.weight"].tobytes() == output.tobytes()


def test_elements_that_no_tensor_fills_stay_as_they_were() -> None:
    manifest = Manifest(tensors=(TensorSpec(name="head", dtype="int16", shape=(5, 4)),))
    whole = Block.contiguous(0, 20)
    layout = build_layout(manifest, [Parameter("head", "int16", 32)], [Placement(0, whole, 0, whole)], {}, "")
    held = [whole_holdings(manifest)]
    sources = random_sources(manifest, seed=0)
    (found,) = execute(plan_program(manifest, layout, held, 64), layout, held, sources)
    assert (found[:20] == sources[0]).all()
    assert set(found[20:].tobytes()) == {NOTHING}


def test_a_dense_model_from_one_trainer_travels_as_it_lies_on_both_sides() -> None:
    manifest, layout = model_layout(QWEN2_7B)
    began = time.process_time()
    program = plan_program(manifest, layout, [whole_holdings(manifest)], 256 * MEGABYTE)
    assert time.process_time() - began < 0.1
    assert shares(program) == pytest.approx((1, 0.986), abs=0.001)
    assert len(program.messages) < 200
    assert set(program.units) == {4}
    assert all(program.whole)


def test_a_mixtures_experts_travel_as_long_runs_of_the_fused_parameters() -> None:
    manifest, layout = model_layout(QWEN3_30B_A3B)
    began = time.process_time()
    program = plan_program(manifest, layout, [whole_holdings(manifest)], 256 * MEGABYTE)
    assert time.process_time() - began < 2
    direct, _ = shares(program)
    assert direct > 0.999
    assert len(program.messages) < 500


def shares(program: Program) -> tuple[float, float]:
    """Of all bytes: received in place; and of these sent as they lie in one source tensor."""
    direct = [message for message in program.messages if message.direct]
    as_they_lie = [m for m in direct if len(m.parts) == 1 and m.parts[0].source_block.is_contiguous]
    return tuple(sum(message.nbytes for message in those) / program.nbytes for those in (direct, as_they_lie))


@pytest.mark.parametrize(("shape", "rank", "ranks"), [(QWEN2_7B, 0, 1), (QWEN2_7B, 1, 2), (QWEN3_30B_A3B, 0, 2)])
@pytest.mark.parametrize("trainers", [2, 4])
def test_trainers_that_all_have_everything_send_equal_shares_at_the_same_time(shape, rank, ranks, trainers) -> None:
    manifest, layout = model_layout(shape, rank=rank, ranks=ranks)
    held = [whole_holdings(manifest, rank) for rank in range(trainers)]
    program = plan_program(manifest, layout, held, 256 * MEGABYTE)
    sent = sender_bytes(program)
    assert len(sent) == trainers
    assert max(sent.values()) < 1.06 * program.nbytes / trainers
    assert_all_send_at_once(program)


@pytest.mark.parametrize("half", [0, 1])
def test_who_alone_holds_much_leaves_to_others_what_they_hold_too(half) -> None:
    manifest = Manifest(tensors=(TensorSpec(name="w", dtype="int8", shape=(64, 16)),))
    other = Holdings(1, tuple(Piece(0, block) for block in chunk((64, 16), 0, half, 2)))
    program = plan_program(manifest, checkpoint_layout(manifest), [whole_holdings(manifest), other], 256)
    assert sender_bytes(program) == {0: 512, 1: 512}


@pytest.mark.parametrize(
    ("offset", "run", "stride", "unit"), [(4, 8, 12, 4), (4, 8, 10, 2), (4, 8, 11, 1), (2, 8, 12, 2), (4, 6, 12, 2)]
)
def test_words_are_as_long_as_offset_run_and_stride_allow_on_either_side(offset, run, stride, unit) -> None:
    manifest = Manifest(tensors=(TensorSpec(name="w", dtype="int8", shape=(64,)),))
    spaced, close = Block(offset, 3, run, stride), Block.contiguous(0, 3 * run)
    for source_block, block in ((spaced, close), (close, spaced)):
        layout = build_layout(manifest, [Parameter("p", "int8", 64)], [Placement(0, source_block, 0, block)], {}, "")
        assert plan_program(manifest, layout, [whole_holdings(manifest)], 256).units == (unit,)


def test_row_shards_of_a_model_are_sent_by_all_ranks_at_once() -> None:
    manifest, layout = model_layout(QWEN2_7B)
    program = plan_program(manifest, layout, sharded(manifest, 8, rows), 64 * MEGABYTE)
    assert set(sender_bytes(program).values()) == {program.nbytes // 8}
    assert_all_send_at_once(program)


def sender_bytes(program: Program) -> Counter:
    sent: Counter = Counter()
    for message in program.messages:
        sent[message.sender] += message.nbytes
    return sent


def assert_all_send_at_once(program: Program) -> None:
    """At any point of the order no sender is ahead of another by more than its next messages."""
    total, sent = sender_bytes(program), Counter()
    longest = max(message.nbytes for message in program.messages)
    for message in program.messages:
        sent[message.sender] += message.nbytes
        done = [sent[rank] / total[rank] for rank in total]
        assert max(done) - min(done) <= 2 * longest / min(total.values())


@pytest.mark.scenario("F59")
@pytest.mark.row("B-C6")
def test_long_blocks_are_cut_evenly_and_short_ones_packed() -> None:
    shapes = {"long": (10 * MEGABYTE,), "one": (16,), "other": (24,)}
    manifest = Manifest(tensors=tuple(TensorSpec(name=n, dtype="int8", shape=shape) for n, shape in shapes.items()))
    parameters = [Parameter(spec.name, "int8", spec.elements) for spec in manifest.tensors]
    whole = [Block.contiguous(0, spec.elements) for spec in manifest.tensors]
    layout = build_layout(
        manifest, parameters, [Placement(n, block, n, block) for n, block in enumerate(whole)], {}, ""
    )
    program = plan_program(manifest, layout, [whole_holdings(manifest)], 4 * MEGABYTE)
    cut, packed = program.messages[:3], program.messages[3:]
    assert [message.nbytes for message in cut] == [3495264, 3495264, 3495232]
    assert [message.run[0] for message in cut] == [0, 0, 0]
    assert [(message.nbytes, message.direct, len(message.parts)) for message in packed] == [(16 + 32, False, 2)]


def test_an_uneven_shard_is_cut_like_torch_chunk_and_empty_ones_send_nothing() -> None:
    manifest = Manifest(tensors=(TensorSpec(name="w", dtype="int8", shape=(5, 64)),))
    held = sharded(manifest, 4, rows)
    assert [len(each.pieces) for each in held] == [1, 1, 1, 0]
    program = plan_program(manifest, checkpoint_layout(manifest), held, 1024)
    assert [(message.sender, message.nbytes) for message in program.messages] == [(0, 128), (1, 128), (2, 64)]


def test_tensors_that_no_trainer_holds_whole_are_named() -> None:
    manifest, layout = model_layout(TINY_DENSE)
    held = sharded(manifest, 3, rows)
    with pytest.raises(
        ValueError,
        match=r"no trainer rank holds 224 of the 640 elements that parameter model.embed_tokens.weight takes",
    ):
        plan_program(manifest, layout, [held[0], held[2]], 256)


def test_programs_of_contradicting_arguments_are_refused() -> None:
    manifest, layout = model_layout(TINY_DENSE)
    other, _ = model_layout(TINY_MIXTURE)
    whole = whole_holdings(manifest)
    with pytest.raises(ValueError, match="limit_bytes is 15; a payload holds at least 16 bytes"):
        plan_program(manifest, layout, [whole], 15)
    with pytest.raises(ValueError, match="these trainer ranks have more than one holding: 0"):
        plan_program(manifest, layout, [whole, whole], 256)
    with pytest.raises(ValueError, match="the layout is of manifest"):
        plan_program(other, layout, [whole], 256)
    with pytest.raises(ValueError, match="trainer rank 2 holds a piece of tensor 99"):
        plan_program(manifest, layout, [Holdings(2, (Piece(99, Block.contiguous(0, 1)),))], 256)


def test_random_orders_of_many_pieces_overlapping_in_every_way_still_send_each_element_once() -> None:
    draw = random.Random(7)
    manifest = Manifest(tensors=(TensorSpec(name="w", dtype="int16", shape=(24, 18)),))
    layout = checkpoint_layout(manifest)
    for _ in range(50):
        held = []
        for rank in range(5):
            start = draw.randrange(24), draw.randrange(18)
            size = draw.randint(1, 24 - start[0]), draw.randint(1, 18 - start[1])
            held.append(Holdings(rank, tuple(Piece(0, block) for block in region((24, 18), start, size))))
        held.append(whole_holdings(manifest, 5))
        sources = random_sources(manifest, seed=4)
        program = plan_program(manifest, layout, held, 128)
        assert execute(program, layout, held, sources)[0].tobytes() == sources[0].tobytes()
        assert sum(part.block.elements for message in program.messages for part in message.parts) == 24 * 18
