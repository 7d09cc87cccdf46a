"""What users have today on the same machine: stock vLLM with its own transfer engines, and its ``reload_weights``."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import SERVED_NAME, Program, free_ports, get, post
from benchmarks.record import median, say

PACKED_BUFFER_BYTES = 2 << 30
"""Packed transfers stage 1 GiB by default, less than a 7B model's embedding."""


class StockEngine(Program):
    """A stock vLLM server whose development routes are open; ``backend`` is one of vLLM's transfer engines, None for none."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        arguments: Sequence[str],
        *,
        backend: str | None,
        name: str = "stock",
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.port, _ = free_ports()
        transfer = [f"--weight-transfer-config={json.dumps({'backend': backend})}"] if backend else []
        # The command line's entry point looks for a distribution of vLLM's name, which its CPU build has not.
        super().__init__(
            folder / f"{name}.log",
            [
                *("-m", "vllm.entrypoints.cli.main", "serve", str(model), f"--served-model-name={SERVED_NAME}"),
                *(f"--port={self.port}", "--host=127.0.0.1"),
                *("--worker-extension-cls=benchmarks.probe.ProbedWorker", *transfer, *arguments),
            ],
            # No plugin of ours in a rival.
            {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_PLUGINS": "", **(more or {})},
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def await_started(self) -> None:
        """Return when it is up."""
        self.await_answer(f"{self.url}/health")
        say(f"{self.log.stem} is up")

    def call(self, method: str, *arguments: Any, seconds: float = 300.0) -> Any:
        """What the worker of rank 0 answers."""
        body = {"method": method, "args": list(arguments), "timeout": seconds}
        return post(f"{self.url}/collective_rpc", body, seconds)["results"][0]

    def live_digest(self) -> str:
        """The digest of its live parameters."""
        return str(self.call("benchmark_live_digest")[0])

    def checksums(self) -> Mapping[str, str]:
        """vLLM's own checksum of every parameter, by name."""
        return dict(self.call("benchmark_checksums"))


def generate(url: str, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy tokens after a prompt of token ids."""
    body = {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return list(post(f"{url}/v1/completions", body)["choices"][0]["token_ids"])


def reload_weights(engine: StockEngine, weights: Mapping[str, torch.Tensor], rounds: int) -> list[float]:
    """Seconds of each ``reload_weights`` of these tensors' shapes, through ``collective_rpc``, source on the engine's own device."""
    tensors = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in weights.items()]
    seconds: list[float] = engine.call("benchmark_reload", tensors, rounds)["seconds"]
    say(f"rival: reload_weights: median {median(seconds) * 1e3:.1f} ms")
    return seconds


def send_ipc(
    engine: StockEngine, weights: Mapping[str, torch.Tensor], rounds: int, *, packed: bool, warm: int = 1
) -> list[float]:
    """Seconds of each ``send_weights()`` of vLLM's own CUDA IPC engine, from this process to the engine's."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    transfer = IPCTrainerWeightTransferEngine.trainer_init(
        IPCTrainerInitInfo(rank=0, packed=packed, packed_buffer_size_bytes=PACKED_BUFFER_BYTES),
        client=_client(engine.url),
        source=_source(weights),
    )
    return _send(transfer, rounds, warm, f"ipc, {'packed' if packed else 'unpacked'}")


def send_nccl(
    engine: StockEngine, weights: Mapping[str, torch.Tensor], rounds: int, *, world_size: int, warm: int = 1
) -> list[float]:
    """Seconds of each ``send_weights()`` of vLLM's own packed NCCL engine, from this process on another GPU."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    port, _ = free_ports()
    transfer = NCCLTrainerWeightTransferEngine.trainer_init(
        NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=world_size, packed=True),
        client=_client(engine.url),
        source=_source(weights),
    )
    return _send(transfer, rounds, warm, "nccl, packed")


def _send(transfer: Any, rounds: int, warm: int, what: str) -> list[float]:
    for _ in range(warm):
        transfer.send_weights()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        transfer.send_weights()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    say(f"rival: {what}: median {median(seconds) * 1e3:.1f} ms of {rounds}")
    return seconds


def _client(url: str) -> Any:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    get(f"{url}/health")
    return HTTPVLLMWeightSyncClient(url)


def _source(weights: Mapping[str, torch.Tensor]) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta

    class Source:
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]

        def __iter__(self) -> Any:
            return iter(weights.items())

    return Source()
