"""What rank 0 does in a group: sends every tensor of a manifest once, in its order, and takes the digest of what it sent."""

import time
from collections.abc import Iterator

import torch

from rolloutfleet.buckets import plan_buckets
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.digest import StreamDigest
from rolloutfleet.transport import gloo, native
from rolloutfleet.weights import NamedTensors


def send(group: gloo.Group | native.Group, manifest: Manifest, tensors: NamedTensors, timeout: float) -> StreamDigest:
    """The digest of all tensors, once they have left this process.

    Raises ValueError for tensors that no longer fit the manifest, TimeoutError, ConnectionAbortedError and ConnectionError as the
    group does. NCCL knows no timeout: there the group must be aborted from another thread.
    """
    if isinstance(group, native.Group):
        return _send_native(group, manifest, tensors)
    return _send_gloo(group, manifest, tensors, time.monotonic() + timeout)


def _send_gloo(group: gloo.Group, manifest: Manifest, tensors: NamedTensors, deadline: float) -> StreamDigest:
    digest = StreamDigest()
    source = tensors.checked(manifest)
    plan = plan_buckets(manifest)
    buffer = torch.zeros(max(bucket.nbytes for bucket in plan), dtype=torch.uint8)
    for bucket in plan:
        for spec, offset in bucket.entries:
            _, tensor = next(source)
            place = buffer[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).reshape(spec.shape)
            place.copy_(tensor.detach())
            digest.update(spec.name, place)
        group.broadcast_from_zero(buffer[: bucket.nbytes], deadline - time.monotonic())
    # Runs the source to its end, where it would say that there are more tensors than the manifest names.
    for _ in source:
        pass
    return digest


def _send_native(group: native.Group, manifest: Manifest, tensors: NamedTensors) -> StreamDigest:
    digest = StreamDigest()
    device = group.communicator.device

    def on_device() -> Iterator[tuple[str, torch.Tensor]]:
        for spec, tensor in tensors.checked(manifest):
            placed = tensor.detach().to(device)
            digest.update(spec.name, placed)
            yield spec.name, placed

    group.send(on_device())
    return digest
