"""A rank remembers the manifests that it used last, as many as the sync job counts on."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.names import KEPT_MANIFESTS
from rolloutfleet.layout import Block, Parameter, Placement, build_layout, checkpoint_layout
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.manifests import KnownManifests, summarize


def captured(name: str) -> Any:
    manifest = Manifest(tensors=(TensorSpec(name=name, dtype="float32", shape=(3,)),))
    return SimpleNamespace(manifest=manifest, layout=checkpoint_layout(manifest, "shape"))


def test_the_manifest_that_was_used_longest_ago_is_forgotten_first() -> None:
    known = KnownManifests()
    kept = [captured(f"w{number}") for number in range(KEPT_MANIFESTS)]
    for one in kept:
        known.add(one)
    assert known.find(kept[0].layout.manifest_digest) is not None
    known.add(captured("new"))
    assert known.find(kept[0].layout.manifest_digest) is not None
    assert known.find(kept[1].layout.manifest_digest) is None
    with pytest.raises(RankError, match=f"not among the last {KEPT_MANIFESTS} that were checked here"):
        known.require(kept[1].layout.manifest_digest)


def test_the_sync_job_is_told_what_a_second_buffer_takes_beside_what_is_placed() -> None:
    manifest = captured("w").manifest
    placed = Placement(0, Block.contiguous(0, 3), 0, Block.contiguous(0, 3))
    summary = summarize(build_layout(manifest, (Parameter("padded", "float32", 100),), [placed], {}, "shape"), 7)
    assert (summary.placed_bytes, summary.staging_bytes, summary.room_bytes) == (12, 512, 7)
