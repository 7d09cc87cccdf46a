"""A trainer in a process of its own, in the environment that vLLM runs in: one refit, well-behaved or not, reported as one JSON line."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rolloutfleet
from rolloutfleet.contract.trainer import Phase, RefitView
from rolloutfleet.transport import gloo


def die_half_way() -> Callable[[RefitView], None]:
    """Has this process killed as soon as the first message of a transfer has left it; gives the watcher that tells it of the transfer."""
    transferring = threading.Event()
    for name in ("send", "broadcast"):
        original = getattr(gloo.Group, name)

        def last(*arguments: Any, original: Callable[..., None] = original) -> None:
            original(*arguments)
            if transferring.is_set():
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(gloo.Group, name, last)
    return lambda view: transferring.set() if view.phase is Phase.TRANSFERRING else None


def watch_phases(phases: list[str], hold_at: Phase | None, folder: Path | None) -> Callable[[RefitView], None]:
    """A watcher that notes phases, and holds this trainer in one: it makes the file ``held`` and goes on once ``go`` is there."""

    def watch(view: RefitView) -> None:
        phases.append(view.phase)
        if folder is not None and view.phase is hold_at and not (folder / "held").exists():
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)  # a file is no event

    return watch


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
    parser.add_argument("--hold-at", type=Phase)
    parser.add_argument("--hold-in", type=Path)
    parser.add_argument("--take-over", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tensors = named_tensors(model, arguments)
    try:
        with rolloutfleet.connect(arguments.address, take_over=arguments.take_over) as fleet:
            phases: list[str] = []
            watch = die_half_way() if arguments.die else watch_phases(phases, arguments.hold_at, arguments.hold_in)
            result = fleet.refit(tensors, version=arguments.version, timeout=120, progress=watch)
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
