"""Writes a tiny Qwen2 with random weights and a byte-level tokenizer; runs in the environment that vLLM runs in."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

EOS, PAD = 256, 257


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any random weights give printable output."""
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<eos>": EOS, "<pad>": PAD}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_config() -> Qwen2Config:
    """Two layers; 32 is the smallest head size that vLLM's CPU attention takes."""
    return Qwen2Config(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )


def write_model(folder: Path) -> None:
    """Model and tokenizer in Hugging Face format; nothing is written if they are there already."""
    if (folder / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder)
    Qwen2ForCausalLM(make_config()).to(torch.float32).save_pretrained(folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
