"""What one rank does in a refit: check a manifest, join a group, receive and load, leave."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm

from rolloutfleet.buckets import plan_buckets
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet.digest import StreamDigest
from rolloutfleet.transport import gloo, native
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.manifest_check import check_manifest
from rolloutfleet_worker.rank.reload import Reload
from rolloutfleet_worker.wire import Frame

Sink = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


class Receiver:
    """The rank operations of a model that lives in this process."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device, rank: int) -> None:
        self.rank = rank
        self._model = model
        self._config = vllm_config
        self._device = device
        self._group: Any = None
        self._guard = threading.Lock()

    def describe(self) -> Frame:
        """Versions and device of this rank, for the ledger."""
        cuda = self._device.type == "cuda"
        return {
            "vllm_version": vllm.__version__,
            "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
            "device": f"GPU-{torch.cuda.get_device_properties(self._device).uuid}" if cuda else "cpu",
        }

    def check(self, body: Frame) -> Frame:
        faults = check_manifest(self._model, self._config, Manifest.model_validate(body["manifest"]))
        return {
            "missing": faults.missing,
            "extra": faults.extra,
            "misshapen": faults.misshapen,
            "consumed": faults.consumed,
        }

    def join(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Join the epoch's group as the commanded rank, which must be the offset plus this process's own rank."""
        rank = body["rank_offset"] + self.rank
        if body["rank"] != rank:
            raise RankError(
                f"ordered to join as rank {body['rank']}, but offset {body['rank_offset']} and local rank {self.rank} give {rank}"
            )
        self.abort()
        rendezvous = Rendezvous.model_validate(body["rendezvous"])
        timeout = float(body["timeout_seconds"])
        try:
            store = gloo.connect_store(rendezvous.host, rendezvous.port, timeout, cancelled)
            if Transport(body["transport"]) is Transport.GLOO:
                group: Any = gloo.form_group(store, body["epoch"], rank, body["world_size"], timeout, cancelled)
            else:
                torch.cuda.set_device(self._device)
                group = native.form_group(
                    store, body["epoch"], rank, body["world_size"], self._device, timeout, cancelled
                )
        except (OSError, RuntimeError, TimeoutError) as error:
            raise RankError(f"rank {rank} could not join at {rendezvous.host}:{rendezvous.port}: {error}") from error
        with self._guard:
            self._group = group
        if cancelled.is_set():
            self.abort()
            raise RankError(f"rank {rank} joined epoch {body['epoch']} after it had been aborted")
        return {"rank": rank}

    def receive(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Receive the manifest's tensors from rank 0 and load them; generation must be paused."""
        manifest = Manifest.model_validate(body["manifest"])
        with self._guard:
            group = self._group
        if group is None or cancelled.is_set():
            raise RankError("this rank is in no group: it has not joined one, or was told to leave it")
        deadline = time.monotonic() + float(body["timeout_seconds"])
        reload, digest = Reload(self._model, self._config), StreamDigest()
        began = time.monotonic()
        loading = 0.0

        def take(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
            nonlocal loading
            for name, tensor in tensors:
                digest.update(name, tensor)
            start = time.monotonic()
            reload.load(iter(tensors))
            loading += time.monotonic() - start

        try:
            if Transport(body["transport"]) is Transport.GLOO:
                _receive_gloo(group, manifest, deadline, take)
            else:
                torch.cuda.set_device(self._device)
                native.receive(group, manifest, self._device, take)
            received = time.monotonic()
            reload.finish()
            live = live_digest(self._model)
        except (
            AssertionError,
            AttributeError,
            IndexError,
            KeyError,
            OSError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            reload.abandon()
            raise RankError(f"rank {self.rank}: {type(error).__name__}: {error}", touched=reload.begun) from error
        ended = time.monotonic()
        return {
            "tensors": digest.tensors,
            "nbytes": digest.nbytes,
            "received_digest": digest.hexdigest(),
            "live_digest": live,
            "receive_seconds": received - began - loading,
            "load_seconds": loading + ended - received,
        }

    def abort(self) -> None:
        """Leave the group and unblock whatever waits in it; safe to call from another thread at any time."""
        with self._guard:
            group, self._group = self._group, None
        if group is not None:
            group.abort()


def _receive_gloo(group: gloo.Group, manifest: Manifest, deadline: float, take: Sink) -> None:
    for bucket in plan_buckets(manifest):
        # A fresh buffer each time: vLLM keeps views of it until their layer is complete.
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        group.broadcast_from_zero(buffer, deadline - time.monotonic())
        take(
            [
                (spec.name, buffer[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).reshape(spec.shape))
                for spec, offset in bucket.entries
            ]
        )
