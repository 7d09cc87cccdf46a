"""Receiving whole tensors in checkpoint format from trainer rank 0: vLLM's packed NCCL broadcast, or buckets over gloo."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rolloutfleet.buckets import plan_buckets
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import Transport
from rolloutfleet.digest import StreamDigest
from rolloutfleet_worker.rank.fresh import FreshLoad
from rolloutfleet_worker.rank.link import RankError, is_cut_off
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.membership import Membership
from rolloutfleet_worker.rank.reload import Reload
from rolloutfleet_worker.rank.tracing import LOADER_ERRORS
from rolloutfleet_worker.wire import Frame

Sink = Callable[[Sequence[tuple[str, torch.Tensor]]], None]

TRANSFER_ERRORS = (*LOADER_ERRORS, OSError)
"""What a transfer and vLLM's loaders raise; a digest that differs is a RuntimeError, a group's end an OSError."""


def receive_whole(
    member: Membership,
    manifest: Manifest,
    reload: Reload,
    model: torch.nn.Module,
    device: torch.device,
    deadline: float,
    fresh: FreshLoad | None = None,
) -> Frame:
    """The report of a version that was received and loaded through vLLM's loader, and compared with a ``fresh`` load where one is given.

    Raises:
        RankError: the transfer or the load failed; ``touched`` once the load had begun.
    """
    digest = StreamDigest()
    began = time.monotonic()
    loading = 0.0

    def take(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        nonlocal loading
        for name, tensor in tensors:
            digest.update(name, tensor)
        if fresh is not None:
            fresh.keep(tensors)
        start = time.monotonic()
        reload.load(iter(tensors))
        loading += time.monotonic() - start

    try:
        if member.transport is Transport.NATIVE:
            from rolloutfleet.transport import native

            native.receive(member.group, manifest, device, take)
        else:
            _receive_buckets(member.group, manifest, deadline, take)
        received = time.monotonic()
        reload.finish()
        if fresh is not None:
            fresh.compare(None)
        live = live_digest(model)
    except TRANSFER_ERRORS as error:
        reload.abandon()
        raise RankError(
            f"rank {member.rank}: {type(error).__name__}: {error}", touched=reload.begun, cut_off=is_cut_off(error)
        ) from error
    ended = time.monotonic()
    return {
        "tensors": digest.tensors,
        "nbytes": digest.nbytes,
        "received_digest": digest.hexdigest(),
        "live_digest": live,
        "receive_seconds": received - began - loading,
        "load_seconds": loading + ended - received,
    }


def _receive_buckets(group: Any, manifest: Manifest, deadline: float, take: Sink) -> None:
    for bucket in plan_buckets(manifest):
        # A fresh buffer each time: vLLM keeps views of it until their layer is complete.
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        group.broadcast(buffer, 0, deadline)
        take(
            [
                (spec.name, buffer[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).reshape(spec.shape))
                for spec, offset in bucket.entries
            ]
        )
