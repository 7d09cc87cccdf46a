"""A trainer in a process of its own, in the environment that vLLM runs in: one refit, well-behaved or not, reported as one JSON line."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rolloutfleet


class Dying:
    """Named tensors whose second reading, the one that sends, kills this process half way."""

    def __init__(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self._named = named
        self._readings = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._readings += 1
        for index, item in enumerate(self._named):
            if self._readings > 1 and index == len(self._named) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def named_tensors(model: torch.nn.Module, arguments: argparse.Namespace) -> list[tuple[str, torch.Tensor]]:
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters() if name not in arguments.drop]
    named = [(name, tensor[..., :-1].contiguous() if name in arguments.misshape else tensor) for name, tensor in named]
    return named + [(name, torch.zeros(4)) for name in arguments.add]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--drop", action="append", default=[])
    parser.add_argument("--add", action="append", default=[])
    parser.add_argument("--misshape", action="append", default=[])
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--take-over", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tensors = named_tensors(model, arguments)
    try:
        with rolloutfleet.connect(arguments.address, take_over=arguments.take_over) as fleet:
            phases: list[str] = []
            result = fleet.refit(
                Dying(tensors) if arguments.die else tensors,
                version=arguments.version,
                timeout=120,
                progress=lambda view: phases.append(view.phase),
            )
    except (rolloutfleet.RolloutFleetError, TypeError, ValueError) as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        sys.exit(3)
    expected = {}
    for prompt in arguments.prompt:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=arguments.tokens, do_sample=False)
        expected[prompt] = output[0][ids.shape[1] :].tolist()
    print(
        json.dumps(
            {"result": json.loads(result.model_dump_json(by_alias=True)), "phases": phases, "expected": expected}
        )
    )


if __name__ == "__main__":
    main()
