"""vLLM in a process of its own, which runs functions of :mod:`tests.engines.layoutranks` on each rank."""

import os
import subprocess
import sys
from collections.abc import Mapping
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tests.engines.cpuengine import CPU_ENGINE

from rolloutfleet.contract.manifest import Manifest, TensorSpec

Tensors = Mapping[str, torch.Tensor]


def manifest_of(tensors: Tensors) -> Manifest:
    return Manifest(
        tensors=tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
    )


class LayoutEngine:
    """The engine of a model folder, coming up; ``unpacked`` keeps CPU linears from packing their weights, as a GPU's do not."""

    def __init__(self, folder: Path, *, dtype: str = "float32", ranks: int = 1, unpacked: bool = False) -> None:
        self.model = folder
        self.dtype = dtype
        self.ranks = ranks
        self.unpacked = unpacked
        self.log = folder.parent / f"{folder.name}-{dtype}-{ranks}.log"
        self._connection, theirs = Pipe()
        options = [str(folder), dtype, str(ranks), "tests.engines.unpacked.Unpacked" if unpacked else ""]
        environment = {**os.environ, **CPU_ENGINE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HOME": str(folder.parent)}
        with self.log.open("w") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.layoutengine", str(theirs.fileno()), *options],
                cwd=Path(__file__).parents[2],
                env={**environment, "PYTHONPATH": str(Path(__file__).parents[2])},
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def call(self, function: str, *arguments: Any) -> list[Any]:
        """What the function gives on each rank."""
        return self._ask("call", function, arguments)

    def one(self, function: str, *arguments: Any) -> Any:
        """What the function gives on the only rank."""
        (answer,) = self.call(function, *arguments)
        return answer

    def generate(self, prompt: str, tokens: int) -> list[int]:
        """Greedy tokens."""
        return self._ask("generate", prompt, (tokens,))

    def hang_up(self) -> None:
        """Let the process end, which takes seconds."""
        self._connection.close()

    def close(self) -> None:
        self.hang_up()
        self._process.wait(60)

    def _ask(self, kind: str, what: str, arguments: tuple[Any, ...]) -> Any:
        try:
            _send(self._connection, (kind, what, arguments))
            failed, answer = _receive(self._connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise AssertionError(self.log.read_text()[-6000:]) from None
        assert not failed, answer
        return answer


def main(descriptor: str, folder: str, dtype: str, ranks: str, extension: str) -> None:
    connection = Connection(int(descriptor))
    from tests.engines import layoutranks
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=dtype,
        tensor_parallel_size=int(ranks),
        enforce_eager=True,
        max_model_len=256,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        worker_extension_cls=extension,
    )
    while True:
        try:
            kind, what, arguments = _receive(connection)
        except EOFError:
            return
        try:
            if kind == "generate":
                sampling = SamplingParams(temperature=0, max_tokens=arguments[0])
                answer: Any = list(engine.generate([what], sampling, use_tqdm=False)[0].outputs[0].token_ids)
            else:
                answer = engine.collective_rpc(getattr(layoutranks, what), args=arguments)
        except Exception as error:  # noqa: BLE001 - the test that asked raises it
            _send(connection, (True, f"{type(error).__name__}: {error}"))
        else:
            _send(connection, (False, answer))


def _send(connection: Any, message: Any) -> None:
    """By value: the connection's own pickling would share memory between processes, and pickle knows not all types of tensors."""
    torch.save(message, buffer := BytesIO())
    connection.send_bytes(buffer.getvalue())


def _receive(connection: Any) -> Any:
    return torch.load(BytesIO(connection.recv_bytes()), weights_only=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
