"""Properties of the bucket plan: trainer and workers derive it apart from each other, so it must depend on the manifest alone."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.buckets import ALIGNMENT, plan_buckets
from rolloutfleet.contract.manifest import DTYPE_BYTES, Manifest, TensorSpec

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
manifests = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), min_size=1, max_size=40).map(
    lambda tensors: Manifest(
        tensors=tuple(
            TensorSpec(name=f"layer.{index}", dtype=dtype, shape=shape) for index, (dtype, shape) in enumerate(tensors)
        )
    )
)
limits = st.integers(ALIGNMENT, 100_000)


@given(manifests, limits)
def test_every_tensor_travels_once_in_manifest_order(manifest: Manifest, limit: int) -> None:
    sent = [spec for bucket in plan_buckets(manifest, limit) for spec, _ in bucket.entries]
    assert tuple(sent) == manifest.tensors


@given(manifests, limits)
def test_tensors_are_aligned_and_neither_overlap_nor_leave_their_bucket(manifest: Manifest, limit: int) -> None:
    for bucket in plan_buckets(manifest, limit):
        end = 0
        for spec, offset in bucket.entries:
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + spec.nbytes
        assert end <= bucket.nbytes
        assert bucket.nbytes % ALIGNMENT == 0
        assert bucket.nbytes > 0


@given(manifests, limits)
def test_only_a_tensor_above_the_limit_makes_a_larger_bucket_and_it_is_alone(manifest: Manifest, limit: int) -> None:
    for bucket in plan_buckets(manifest, limit):
        if bucket.nbytes > limit:
            assert len(bucket.entries) == 1


@given(manifests, limits)
def test_buckets_are_numbered_and_closed_only_when_the_next_tensor_does_not_fit(manifest: Manifest, limit: int) -> None:
    plan = plan_buckets(manifest, limit)
    assert [bucket.index for bucket in plan] == list(range(len(plan)))
    for bucket, following in pairwise(plan):
        used = max(offset + -(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec, offset in bucket.entries)
        first, _ = following.entries[0]
        assert used + first.nbytes > limit - ALIGNMENT


@given(manifests, limits)
def test_the_plan_depends_on_the_manifest_alone(manifest: Manifest, limit: int) -> None:
    again = Manifest.model_validate_json(manifest.model_dump_json())
    assert plan_buckets(again, limit) == plan_buckets(manifest, limit)


def test_a_limit_too_small_for_one_aligned_tensor_is_refused() -> None:
    manifest = Manifest(tensors=(TensorSpec(name="w", dtype="int8", shape=(1,)),))
    with pytest.raises(ValueError, match="limit_bytes is 8; a bucket holds at least 16 bytes"):
        plan_buckets(manifest, 8)
