"""The models whose shapes are measured: a folder that vLLM starts from without weights, and the tensors of a trainer that trains one.

A shape is a real model's, or that of a real model cut to fewer layers, with ``TINY=1`` a toy of the same architecture for a dry run on
CPUs. Weights are random: what a refit costs does not depend on their values, and random ones differ everywhere.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from benchmarks.record import TINY

DEVICE = "cpu" if TINY else "cuda"
_EOS, _PAD = 256, 257
_NAMED: Mapping[str, Any] = {"eos_token_id": _EOS, "pad_token_id": _PAD, "bos_token_id": None}
_TOY: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    **_NAMED,
}
"""32 is the smallest head size that vLLM's attention takes on CPUs."""


@dataclass(frozen=True)
class Shape:
    """A model's shape."""

    name: str
    config: PreTrainedConfig
    dtype: torch.dtype

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape by checkpoint name, in the checkpoint's order; experts one by one, as a checkpoint has them."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return {
            name: tuple(tensor.shape)
            for parameter, tensor in model.named_parameters()
            for name, tensor in _checkpoint_names(parameter, tensor)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) for shape in self.tensors.values()) * int(self.dtype.itemsize)

    def weights(self, seed: int, device: str = DEVICE) -> dict[str, torch.Tensor]:
        """Random tensors by checkpoint name, equal for equal seeds on one kind of device."""
        weights = {name: torch.empty(shape, dtype=self.dtype, device=device) for name, shape in self.tensors.items()}
        fill(weights, seed)
        return weights

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> Path:
        """The folder, with config and byte-level tokenizer, and with a checkpoint when there are weights for one."""
        folder.mkdir(parents=True)
        self.config.save_pretrained(folder)
        alphabet = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<eos>": _EOS, "<pad>": _PAD}, merges=[]))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        named = {"eos_token": "<eos>", "pad_token": "<pad>"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
        if weights is not None:
            from safetensors.torch import save_file

            save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors")
        return folder


def fill(weights: Mapping[str, torch.Tensor], seed: int) -> None:
    """Give the tensors other values where they lie: norms near one, everything else near zero, as initialisation would."""
    generator = torch.Generator(device=next(iter(weights.values())).device).manual_seed(seed)
    for name, tensor in weights.items():
        tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02, generator=generator)


def _checkpoint_names(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers keeps all experts of a layer in two tensors; a checkpoint keeps each by itself."""
    layer, found, kind = name.partition(".experts.")
    if not found:
        yield name, tensor
        return
    for expert, block in enumerate(tensor):
        parts = {"down_proj": block}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), block.chunk(2), strict=True))
        yield from ((f"{layer}.experts.{expert}.{part}.weight", rows) for part, rows in parts.items())


def dense(layers: int = 28, *, toy_vocabulary: int = 320) -> Shape:
    """Qwen2-7B: 15.2 GB in bf16; ``toy_vocabulary`` makes the toy as large as a test needs."""
    config: dict[str, Any] = {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": layers,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **_NAMED,
    }
    toy = {**_TOY, "vocab_size": toy_vocabulary}
    return _shape("dense", Qwen2Config(tie_word_embeddings=False, **(toy if TINY else config)))


def experts(layers: int = 8) -> Shape:
    """Qwen3-30B-A3B: 61 GB in bf16 with all 48 layers, 11.2 GB with 8."""
    config: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **_NAMED,
    }
    toy = {**_TOY, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
    return _shape("moe", Qwen3MoeConfig(tie_word_embeddings=False, norm_topk_prob=True, **(toy if TINY else config)))


def tied(layers: int = 16) -> Shape:
    """Llama-3.2-1B, whose output head is its embedding: 2.5 GB in bf16."""
    config: dict[str, Any] = {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        **_NAMED,
    }
    return _shape("tied", LlamaConfig(tie_word_embeddings=True, **(_TOY if TINY else config)))


def _shape(name: str, config: PreTrainedConfig) -> Shape:
    config.dtype = torch.bfloat16
    # vLLM takes the architecture from the folder's config, which a trained model's save would have written.
    config.architectures = [
        {"qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}[
            config.model_type
        ]
    ]
    return Shape(name=name, config=config, dtype=config.dtype)
