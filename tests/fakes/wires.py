"""Two transports for the client's contract tests: one in memory that blocks and aborts as gloo does, and gloo itself."""

import hashlib
import importlib.util
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import rolloutfleet.transport
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.policy import Wire
from rolloutfleet.sources.source import WeightSource


class MemoryGroup:
    """Rank 0 hands every tensor to every other rank and waits until all have taken it, as a slow network would make it."""

    def __init__(self, epoch: int, world_size: int) -> None:
        self.epoch = epoch
        self._world_size = world_size
        self._present: set[int] = set()
        self._sent: list[tuple[str, str]] = []
        self._taken: dict[int, int] = {}
        self._ended = ""
        self._change = threading.Condition()

    def arrive(self, rank: int, timeout: float, cancelled: threading.Event | None) -> None:
        with self._change:
            self._present.add(rank)
            self._change.notify_all()
            until = time.monotonic() + timeout
            while len(self._present) < self._world_size:
                if (cancelled is not None and cancelled.is_set()) or self._ended:
                    raise ConnectionAbortedError(f"joining epoch {self.epoch} was cancelled")
                if time.monotonic() > until:
                    raise TimeoutError(f"epoch {self.epoch} did not form in time")
                self._change.wait(0.02)

    def send(self, name: str, content: str, timeout: float) -> None:
        with self._change:
            self._sent.append((name, content))
            self._change.notify_all()
            wanted = len(self._sent)
            taken = self._change.wait_for(
                lambda: self._ended or sum(count >= wanted for count in self._taken.values()) == self._world_size - 1,
                timeout,
            )
            self._raise_if_ended()
            if not taken:
                raise TimeoutError("a member has stopped")

    def take(self, rank: int) -> tuple[str, str]:
        with self._change:
            index = self._taken.setdefault(rank, 0)
            self._change.wait_for(lambda: self._ended or len(self._sent) > index)
            self._raise_if_ended()
            self._taken[rank] += 1
            self._change.notify_all()
            return self._sent[index]

    def abort(self, reason: str = "aborted") -> None:
        with self._change:
            self._ended = self._ended or reason
            self._change.notify_all()

    def _raise_if_ended(self) -> None:
        if self._ended:
            raise ConnectionAbortedError(f"the group of epoch {self.epoch} has ended: {self._ended}")


class TextDigest:
    """Stands for the tensors' digest where there are no tensors."""

    def __init__(self) -> None:
        self.tensors = self.nbytes = 0
        self._hash = hashlib.sha256()

    def update(self, name: str, content: str, nbytes: int) -> None:
        self._hash.update(f"{name} {content}\n".encode())
        self.tensors += 1
        self.nbytes += nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class TextTensor:
    """Has of a tensor what the client looks at."""

    content: str
    shape: tuple[int, ...] = (2,)
    dtype: str = "torch.float32"

    def detach(self) -> "TextTensor":
        return self

    def data_ptr(self) -> int:
        return id(self)

    def stride(self) -> tuple[int, ...]:
        return (1,)


class MemoryWire:
    """Replaces the client's transport modules by groups in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._groups: dict[tuple[int, int], MemoryGroup] = {}
        self._guard = threading.Lock()
        for name, module in {
            "store": SimpleNamespace(host_store=self._host),
            "group": SimpleNamespace(form_group=self._form),
            "exchange": SimpleNamespace(publish_holdings=lambda *_: None),
            "sending": SimpleNamespace(send=self._send),
        }.items():
            monkeypatch.setitem(sys.modules, f"rolloutfleet.transport.{name}", module)
            monkeypatch.setattr(rolloutfleet.transport, name, module, raising=False)
        if importlib.util.find_spec("torch") is None:
            no_gpu = SimpleNamespace(is_available=lambda: False, is_initialized=lambda: False)
            monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str, cuda=no_gpu))

    def _host(self, listening: socket.socket, timeout: float) -> int:
        with listening:
            return listening.getsockname()[1]

    def join(self, host: str, port: int, epoch: int, rank: int, world_size: int, timeout: float) -> MemoryGroup:
        with self._guard:
            group = self._groups.setdefault((port, epoch), MemoryGroup(epoch, world_size))
        group.arrive(rank, timeout, None)
        return group

    def receive(self, group: MemoryGroup, rank: int, manifest: Manifest) -> TextDigest:
        digest = TextDigest()
        for spec in manifest.tensors:
            name, content = group.take(rank)
            assert name == spec.name
            digest.update(name, content, spec.nbytes)
        return digest

    def tensor(self, content: str) -> TextTensor:
        return TextTensor(content)

    def _form(
        self,
        wire: Wire,
        port: int,
        epoch: int,
        rank: int,
        world_size: int,
        device: object,
        timeout: float,
        cancelled: threading.Event,
    ) -> MemoryGroup:
        assert wire is Wire.GLOO
        with self._guard:
            group = self._groups.setdefault((port, epoch), MemoryGroup(epoch, world_size))
        group.arrive(rank, timeout, cancelled)
        return group

    def _send(self, group: MemoryGroup, manifest: Manifest, source: WeightSource, timeout: float) -> TextDigest:
        digest = TextDigest()
        source.bind(manifest)
        for spec, tensor in source.whole():
            group.send(spec.name, tensor.content, timeout)
            digest.update(spec.name, tensor.content, spec.nbytes)
        return digest


class GlooWire:
    """The transport itself, with engines as threads."""

    def join(self, host: str, port: int, epoch: int, rank: int, world_size: int, timeout: float) -> Any:
        from rolloutfleet.transport import gloo

        return gloo.form_group(gloo.connect_store(host, port, timeout), epoch, rank, world_size, timeout)

    def receive(self, group: Any, rank: int, manifest: Manifest) -> Any:
        import torch

        from rolloutfleet.buckets import plan_buckets
        from rolloutfleet.digest import StreamDigest

        digest = StreamDigest()
        for bucket in plan_buckets(manifest):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            group.broadcast(buffer, 0, time.monotonic() + 60)
            for spec, offset in bucket.entries:
                tensor = buffer[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype)).reshape(spec.shape)
                digest.update(spec.name, tensor)
        return digest

    def tensor(self, content: str) -> Any:
        import torch

        # Larger than what socket buffers hold, so that a sender blocks when nobody receives.
        return torch.full((4 << 20,), float(len(content)))
