"""A window into an engine under measurement, for benchmarks alone: a route in its API server, and methods in its worker.

A stock engine answers ``collective_rpc`` when its development routes are open. The launcher refuses to open those, so an engine of a
fleet is started with :class:`Probe` as one more ``--middleware``; either way :class:`ProbedWorker` answers, vLLM's
``--worker-extension-cls``.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import PROBE_PATH
from benchmarks.record import TINY
from rolloutfleet_worker.rank.live_digest import live_digest

Message = MutableMapping[str, Any]

if TINY:
    # This module is imported in vLLM's worker before the model is loaded. Packed weights would leave nothing to write in place on a CPU.
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


class Probe:
    """ASGI middleware: ``POST /benchmark/rpc`` with a method and its arguments is answered with what each worker returns."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PROBE_PATH:
            await self._app(scope, receive, send)
            return
        content = bytearray()
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(content)
        results = await scope["app"].state.engine_client.collective_rpc(
            method=body["method"], args=tuple(body.get("args", ())), timeout=body.get("timeout", 300.0)
        )
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"results": results}).encode()})


class ProbedWorker:
    """Methods beside vLLM's own worker's; ``self`` is that worker."""

    model_runner: Any
    device: torch.device
    weight_transfer_engine: Any

    def benchmark_reload(self, tensors: list[list[Any]], rounds: int) -> dict[str, list[float]]:
        """Seconds of each ``reload_weights`` from tensors that already lie on this device; ``tensors`` has name, dtype and shape."""
        generator = torch.Generator(device=self.device).manual_seed(1)
        source = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device).normal_(
                0.0, 0.02, generator=generator
            )
            for name, dtype, shape in tensors
        }

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            yield from source.items()

        return {"seconds": self._timed(lambda: self.model_runner.reload_weights(weights_iterator=weights()), rounds)}

    def benchmark_live_digest(self) -> list[str]:
        """The digest of every live parameter, by the code with which a fleet's workers take theirs."""
        return [live_digest(self.model_runner.get_model())]

    def benchmark_checksums(self) -> dict[str, str]:
        """vLLM's own sha256 of every parameter, by name."""
        from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

        return dict(compute_tensor_digests(self.model_runner.get_model()))

    def benchmark_memory(self) -> dict[str, int]:
        """Bytes: free on the device as the driver says, held by this process's allocator, resident in the host's memory."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        if self.device.type != "cuda":
            return {"free": 0, "allocated": 0, "reserved": 0, "resident": resident}
        torch.cuda.synchronize()
        return {
            "free": torch.cuda.mem_get_info(self.device)[0],
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "resident": resident,
        }

    def benchmark_digests(self, switch: str) -> list[str]:
        """Take sums from now on (``on``) or leave them at zero (``off``); the trainer must do the same."""
        from benchmarks.digests import switch_digests

        switch_digests(on=switch == "on")
        return [switch]

    def benchmark_watch(self) -> dict[str, Any]:
        """What this rank did since the last time it was asked; the first time nothing, for the watch begins then."""
        from benchmarks.watching import Watch

        if not hasattr(self, "_benchmark_watch"):
            self._benchmark_watch = Watch()
            self._benchmark_watch.begin()
        return self._benchmark_watch.read()

    def benchmark_profile_begin(self) -> list[float]:
        """Start the profiler in this process; its wall clock."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._benchmark_profile = torch.profiler.profile(activities=activities)
        self._benchmark_profile.start()
        return [time.time()]

    def benchmark_profile_end(self, path: str) -> list[float]:
        """Stop the profiler and write a Chrome trace."""
        self._benchmark_profile.stop()
        self._benchmark_profile.export_chrome_trace(path)
        return [time.time()]

    def _timed(self, work: Callable[[], object], rounds: int) -> list[float]:
        seconds = []
        for _ in range(rounds):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
