"""Random adapters as PEFT names their tensors, and the model that each comes to when it is merged into its base."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.engines.hostfleet import HostFleet, Launched
from tests.engines.refitting import PROMPTS, TOKENS
from tests.engines.tinymodels import greedy_tokens, make_model
from transformers import PreTrainedModel

import rolloutfleet
from rolloutfleet.contract.trainer import RefitResult

RANK, ALPHA = 8, 16
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": list(EVERYWHERE),
    "bias": "none",
}


def adapter_tensors(
    folder: Path, seed: int, *, rank: int = RANK, modules: Sequence[str] = EVERYWHERE
) -> dict[str, torch.Tensor]:
    """Both halves for every such module; strong enough to change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in make_model(folder, 0).named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules and name.endswith(".weight"):
            rows, columns = parameter.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) / 10
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 10
    return tensors


def merged(
    folder: Path, base: int, adapter: Mapping[str, torch.Tensor], scale: float = ALPHA / RANK
) -> PreTrainedModel:
    """The base of this seed with the adapter added to its weights."""
    model = make_model(folder, base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.lora_A.weight" in adapter:
                parameter += scale * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
    return model


def refit_adapter(
    fleet: HostFleet,
    trainer: rolloutfleet.Fleet,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] = CONFIG,
) -> RefitResult:
    result = trainer.refit_adapter(name, tensors, fleet.version + 1, config, timeout=120)
    fleet.version = result.version
    assert (result.staged, result.tensors, result.members) == (True, len(tensors), tuple(e.name for e in fleet.engines))
    return result


def assert_says(
    fleet: HostFleet, named: str, model: PreTrainedModel, version: int | None = None, only: Launched | None = None
) -> None:
    """Every engine (or one) answers a request that names this with the model's tokens, under the fleet's version."""
    wanted = fleet.version if version is None else version
    for prompt in PROMPTS:
        expected = greedy_tokens(model, fleet.model, prompt, TOKENS)
        for engine in [only] if only else fleet.engines:
            assert engine.generate(prompt, TOKENS, named) == (expected, wanted), (engine.name, named, prompt)
