"""What rank 0 does in a group that broadcasts whole tensors: sends every tensor of a manifest once, in order, and digests what it sent."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rolloutfleet.buckets import plan_buckets
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.digest import StreamDigest
from rolloutfleet.sources.source import WeightSource
from rolloutfleet.transport import native
from rolloutfleet.transport.group import Group


def send(group: Group | native.Group, manifest: Manifest, source: WeightSource, timeout: float) -> StreamDigest:
    """The digest of all tensors, once they have left this process.

    Raises ValueError for tensors that no longer fit the manifest or of which this process holds only a part, TimeoutError,
    ConnectionAbortedError and ConnectionError as the group does. NCCL knows no timeout: there the group must be aborted from another
    thread.
    """
    source.bind(manifest)
    if isinstance(group, native.Group):
        return _send_native(group, source)
    return _send_gloo(group, manifest, source, time.monotonic() + timeout)


def _send_gloo(group: Group, manifest: Manifest, source: WeightSource, deadline: float) -> StreamDigest:
    digest = StreamDigest()
    tensors = source.whole()
    plan = plan_buckets(manifest)
    buffer = torch.zeros(max(bucket.nbytes for bucket in plan), dtype=torch.uint8)
    with ThreadPoolExecutor(1, thread_name_prefix="rolloutfleet-sums") as beside:
        for bucket in plan:
            placed: list[tuple[str, torch.Tensor]] = []
            for spec, offset in bucket.entries:
                _, tensor = next(tensors)
                place = buffer[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).reshape(spec.shape)
                place.copy_(tensor.detach())
                placed.append((spec.name, place))
            # A bucket is digested while it leaves, and the next one takes its place when both have ended.
            digested = beside.submit(_digest, digest, placed)
            group.broadcast(buffer[: bucket.nbytes], 0, deadline)
            digested.result()
    return digest


def _digest(digest: StreamDigest, placed: Sequence[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in placed:
        digest.update(name, tensor)


def _send_native(group: native.Group, source: WeightSource) -> StreamDigest:
    digest = StreamDigest()
    device = group.communicator.device

    def on_device() -> Iterator[tuple[str, torch.Tensor]]:
        for spec, tensor in source.whole():
            placed = tensor.detach().to(device)
            digest.update(spec.name, placed)
            yield spec.name, placed

    group.send(on_device())
    return digest
