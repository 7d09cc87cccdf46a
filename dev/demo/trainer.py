"""A trainer process: refits the fleet with new random weights and prints, as JSON lines, what each engine generates before and after.

Beside it stands what transformers' ``generate()`` makes of the same weights. Runs in the environment that vLLM runs in.
"""

import argparse
import json
import logging
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import rolloutfleet

PROMPT = "The fleet is"
NEW_TOKENS = 12


def random_model(path: str, seed: int) -> PreTrainedModel:
    """The model's architecture with weights drawn from a seed, in fp32 so that two implementations agree token for token."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32).eval()


def expected_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Greedy tokens by transformers."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens: list[int] = output[0][ids.shape[1] :].tolist()
    return tokens


def engine_tokens(fleet: rolloutfleet.Fleet, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Greedy tokens by each engine, by pod name."""
    prompt = tokenizer(PROMPT).input_ids
    count = len(fleet.endpoints())
    sampling = rolloutfleet.Sampling(max_new_tokens=NEW_TOKENS)
    answer = fleet.generate([prompt] * count, [len(prompt)] * count, greedy=True, sampling=sampling)
    return {
        engine: ids[len(prompt) : length]
        for engine, ids, length in zip(
            answer["engines"], answer["output_ids"], answer["unpadded_sequence_lengths"], strict=True
        )
    }


def main() -> int:
    """Refit as often as asked; 0 when every engine gave transformers' tokens each time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="URL of the fleet's sync Service")
    parser.add_argument("--model", required=True, help="folder of the model's configuration and tokenizer")
    parser.add_argument("--refits", type=int, default=2)
    parser.add_argument("--engines", type=int, required=True, help="how many engines must answer")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="trainer: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    all_equal = True
    with rolloutfleet.connect(arguments.address) as fleet:
        first = fleet.view().version + 1
        for version in range(first, first + arguments.refits):
            model = random_model(arguments.model, seed=version)
            before = engine_tokens(fleet, tokenizer)
            result = fleet.refit(model, version=version)
            after, expected = engine_tokens(fleet, tokenizer), expected_tokens(model, tokenizer)
            equal = len(after) == arguments.engines and all(tokens == expected for tokens in after.values())
            all_equal = all_equal and equal
            line = {
                "result": json.loads(result.model_dump_json(by_alias=True)),
                "before": before,
                "after": after,
                "transformers": expected,
                "equal": equal,
            }
            print(json.dumps(line), flush=True)
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
