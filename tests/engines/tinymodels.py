"""Random models of the architectures under test, small enough for two cores, and what transformers generates with them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rolloutfleet.digest import StreamDigest

EOS, PAD = 256, 257
NAMED = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
# 32 is the smallest head size that vLLM's CPU attention takes.
ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}

BUCKETED = Qwen2Config(
    vocab_size=66_048, hidden_size=256, intermediate_size=256, tie_word_embeddings=False, **ATTENTION, **NAMED
)
"""Embedding and head are larger than a bucket each, so a transfer takes three."""
TIED = LlamaConfig(
    vocab_size=260, hidden_size=128, intermediate_size=192, tie_word_embeddings=True, **ATTENTION, **NAMED
)
"""The vocabulary is no multiple of what vLLM pads it to."""
GROUPED = Qwen2Config(
    vocab_size=260, hidden_size=128, intermediate_size=192, tie_word_embeddings=False, **ATTENTION, **NAMED
)
"""Projections with biases, of which vLLM fuses some."""
EXPERTS = Qwen3MoeConfig(
    vocab_size=260,
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    head_dim=32,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    **ATTENTION,
    **NAMED,
)


def write_model(folder: Path, config: PreTrainedConfig) -> Path:
    """The folder, with a checkpoint of seed 0 and a byte-level tokenizer in Hugging Face format."""
    folder.mkdir()
    config.save_pretrained(folder)
    make_model(folder, 0).save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    unused = {f"<{index}>": index for index in range(PAD + 1, config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<eos>": EOS, "<pad>": PAD, **unused}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


def make_model(folder: Path, seed: int) -> PreTrainedModel:
    """The folder's architecture with weights of this seed, in float32 as the engines compute."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()


def vary_vectors(model: PreTrainedModel) -> PreTrainedModel:
    """The model with norms and biases that are not one value all over, as training leaves them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def greedy_tokens(model: PreTrainedModel, folder: Path, prompt: str, tokens: int) -> list[int]:
    """What transformers' own generate() appends to the prompt."""
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return output[0][ids.shape[1] :].tolist()


def greedy_choices(model: PreTrainedModel, folder: Path, prompt: str, tokens: list[int]) -> list[int]:
    """What the model would say at each place of an answer, given the prompt and the answer's tokens before it."""
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor([tokens])], 1)).logits[0]
    return logits[ids.shape[1] - 1 : -1].argmax(-1).tolist()


def named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters under the names that the trainer has in memory."""
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The same tensors under a checkpoint's names: transformers keeps all experts of a layer in two, a checkpoint each by itself."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        layer, found, kind = name.partition(".experts.")
        if not found:
            tensors[name] = tensor
            continue
        for expert, block in enumerate(tensor):
            parts = {"down_proj": block}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), block.chunk(2), strict=True))
            for part, rows in parts.items():
                tensors[f"{layer}.experts.{expert}.{part}.weight"] = rows
    return tensors


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    digest = StreamDigest()
    for name, tensor in tensors.items():
        digest.update(name, tensor)
    return digest.hexdigest()
