"""Parallel sizes -> pods of equal size."""

import pytest

from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.plan.placement.shape import Nesting, Parallelism, find_shape, shapes_for

R, S = Nesting.REPLICAS, Nesting.STAGES


@pytest.mark.parametrize(
    ("sizes", "data", "world"),
    [
        (Parallelism(), 1, 1),
        (Parallelism(8), 1, 8),
        (Parallelism(8, 2), 1, 16),
        (Parallelism(4, 1, 16), 4, 16),
        (Parallelism(2, 2, 4), 2, 8),
        (Parallelism(4, 1, 4), 1, 4),
    ],
)
def test_data_parallel_size_is_derived_and_never_zero(sizes, data, world):
    assert (sizes.data, sizes.world) == (data, world)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": 4, "expert": 6}, "expert is 6, which is no multiple of parallelism.tensor 4.*set expert to 4 or 8"),
        ({"tensor": 4, "expert": 2}, "expert is 2, which is no multiple of parallelism.tensor 4.*set expert to 4$"),
        ({"tensor": 0}, "parallelism.tensor is 0, but it must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused_with_both_numbers(given, message):
    with pytest.raises(InvalidSpecError, match=message):
        Parallelism(**given)


@pytest.mark.parametrize(
    ("sizes", "node", "pods"),
    [
        (Parallelism(8), [8], [(1, 8), (2, 4), (4, 2), (8, 1)]),
        (Parallelism(8, 2), [8], [(2, 8), (4, 4), (8, 2), (16, 1)]),
        (Parallelism(8), [4], [(2, 4), (4, 2), (8, 1)]),
        (Parallelism(3), [8], [(1, 3), (3, 1)]),
        # 12 GPUs in groups of 6: 4 on a node would cut a tensor group 4 + 2.
        (Parallelism(6, 2), [8], [(2, 6), (4, 3), (6, 2), (12, 1)]),
        (Parallelism(2, 1, 16), [8], [(2, 8), (4, 4), (8, 2), (16, 1)]),
        (Parallelism(2, 1, 12), [8], [(2, 6), (3, 4), (6, 2), (12, 1)]),
    ],
)
def test_pods_are_equal_and_never_cut_a_group_unevenly(sizes, node, pods):
    assert [(shape.pods, shape.gpus) for shape in shapes_for(sizes, node, R)] == pods


def test_the_kind_of_node_decides_the_pods():
    assert shapes_for(Parallelism(8), [8], R)[0].pods == 1
    assert shapes_for(Parallelism(8), [4], R)[0].pods == 2


def test_stages_gather_the_pods_of_one_pipeline_stage():
    shape = find_shape(Parallelism(8, 2, 16), 4, S)
    assert (shape.tensor_pods, shape.middle_tensors, shape.middles) == (2, 2, 2)
    # In order of ranks: replica 0 stage 0, replica 0 stage 1, replica 1 stage 0, replica 1 stage 1.
    assert shape.pod_order() == (0, 1, 4, 5, 2, 3, 6, 7)


@pytest.mark.parametrize("nesting", [R, S])
@pytest.mark.parametrize("sizes", [Parallelism(4, 2, 16), Parallelism(2, 4, 4), Parallelism(1, 2, 8)])
def test_the_order_of_pods_is_a_permutation(sizes, nesting):
    for shape in shapes_for(sizes, [8], nesting):
        assert sorted(shape.pod_order()) == list(range(shape.pods))
        assert shape.pods * shape.gpus == sizes.world
