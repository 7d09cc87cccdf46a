"""Real vLLM on CPUs with a model small enough for a run: how its engines are started, what the trainer sends, what a version answers.

The answer is greedy output, which transformers computes beforehand from the same weights, in a process that has torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.chaos.fleet import EngineKind, engine_python
from benchmarks.record import ROOT

if TYPE_CHECKING:
    import torch

    from benchmarks.shapes import Shape

TOKENS: Final = 10
PROMPT: Final = tuple(range(40, 64))
START_SECONDS: Final = 400.0
_ENVIRONMENT: Final[Mapping[str, str]] = {
    "TINY": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def vllm_kind(model: Path) -> EngineKind:
    """Engines that serve the model in float32, and keep their weights where a trainer can write them."""
    arguments = (
        str(model),
        "--served-model-name=tiny",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=256",
        "--num-gpu-blocks-override=64",
        "--worker-extension-cls=tests.engines.unpacked.Unpacked",
    )
    body = {
        "model": "tiny",
        "prompt": list(PROMPT),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return EngineKind(
        arguments=arguments,
        model=str(model),
        environment=_ENVIRONMENT,
        start_seconds=START_SECONDS,
        rank_title="VLLM::Worker",
        body=body,
        answer_seconds=10.0,
    )


class TinyOracle:
    """Says what an engine answers that serves a version; writes the model's folder first, with version 0 as its checkpoint."""

    def __init__(self, model: Path) -> None:
        paths = os.pathsep.join(str(ROOT / part) for part in ("client", "operator", "worker_image", "."))
        self._process = subprocess.Popen(
            [engine_python(), "-m", "benchmarks.chaos.tiny", str(model)],
            env={**os.environ, **_ENVIRONMENT, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: dict[str, int] = {}
        self.expected(0)

    @cache  # noqa: B019 - one oracle lives as long as the program
    def expected(self, version: int) -> str:
        """The answer's text; ValueError when another version has the same one, so that answers would not tell them apart."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{version}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        if not said:
            raise ValueError(f"no answer for version {version}; the process that computes it has ended")
        if self._said.setdefault(said, version) != version:
            raise ValueError(f"versions {self._said[said]} and {version} answer alike: {said}")
        return said


@cache
def _shape() -> "Shape":
    from dataclasses import replace

    import torch

    from benchmarks.record import TINY
    from benchmarks.shapes import dense

    if not TINY:
        raise ValueError("TINY is not set: this would be the shape of a model of 15 GB")
    shape = replace(dense(), dtype=torch.float32)
    shape.config.dtype = torch.float32
    return shape


def tiny_weights(version: int) -> "dict[str, torch.Tensor]":
    """A version's tensors: random ones, large enough that versions answer differently."""
    weights = _shape().weights(version, device="cpu")
    for name, tensor in weights.items():
        if not name.endswith("norm.weight"):
            tensor.mul_(5.0)
    return weights


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    _shape().write(folder, tiny_weights(0))
    model: Any = AutoModelForCausalLM.from_config(_shape().config, dtype=torch.float32).eval()
    # As the engines are asked: the end of a text is a token like any other. A least length would forbid it instead.
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    for line in sys.stdin:
        model.load_state_dict(tiny_weights(int(line)), strict=False)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        print(json.dumps(output[0][len(PROMPT) :].tolist()), flush=True)


if __name__ == "__main__":
    main()
