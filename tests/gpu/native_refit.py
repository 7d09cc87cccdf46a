"""Refit a real vLLM engine over a real transport on one machine, without Kubernetes, and hold its tokens against transformers.

Starts launcher and sync job as the pods would, and refits several times, each time with other weights. On one GPU the trainer and the
engine share it: two values of NCCL_HOSTID let NCCL take them for two hosts, so bytes cross its network transport over loopback. That
proves the path, not its speed. On two GPUs the engine has the first and the trainer the last. By hand::

    PYTHONPATH=client:operator:worker_image:. python3 tests/gpu/native_refit.py --transport Native
"""

import os
import sys
from contextlib import ExitStack

import torch
from benchmarks.processes import Engine, Fleet
from benchmarks.record import TINY, Record, say
from benchmarks.refits import measured_refit, next_version
from benchmarks.shapes import DEVICE, Shape, dense, experts, tied
from benchmarks.starting import engine_arguments, parser, run_folder
from transformers import AutoModelForCausalLM, PreTrainedModel

import rolloutfleet
from rolloutfleet.contract.policy import RefitPolicy, Transport

NAME = "native_refit"
SHAPES = {"dense": dense, "moe": experts, "tied": tied}
PROMPT = list(range(40, 72))
TOKENS = 12


def make_model(shape: Shape, seed: int, device: str) -> PreTrainedModel:
    """transformers' model of the shape with weights of this seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config, dtype=shape.dtype).eval()


@torch.no_grad()
def disagreement(model: PreTrainedModel, tokens: list[int], logprobs: list[float]) -> float:
    """Mean difference of the log probabilities that vLLM and transformers give to vLLM's tokens after the prompt."""
    ids = torch.tensor([PROMPT + tokens], device=model.device)
    scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    wanted = [float(scores[len(PROMPT) - 1 + place, token]) for place, token in enumerate(tokens)]
    return sum(abs(a - b) for a, b in zip(wanted, logprobs, strict=True)) / len(tokens)


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("--transport", type=Transport, choices=list(Transport), default=Transport.NATIVE)
    options.add_argument("--shape", choices=sorted(SHAPES), default="dense")
    options.add_argument("--refits", type=int, default=3)
    chosen = options.parse_args()
    shape, device, environment = SHAPES[chosen.shape](), DEVICE, {}
    if not TINY:
        device = f"cuda:{torch.cuda.device_count() - 1}"
        torch.cuda.set_device(device)
        environment = {"CUDA_VISIBLE_DEVICES": "0"}
        if torch.cuda.device_count() == 1:
            os.environ["NCCL_HOSTID"] = "trainer"
            environment = {"NCCL_HOSTID": "engine"}
    record = Record(NAME, chosen.output)
    with run_folder() as folder, ExitStack() as stack, record.part(str(chosen.transport)):
        engine = Engine(folder, shape.write(folder / "model"), engine_arguments(shape), more=environment)
        stack.callback(engine.stop)
        fleet = Fleet(folder, [engine])
        stack.callback(fleet.stop_sync)
        fleet.start(RefitPolicy(transport=chosen.transport))
        with fleet.connect() as trainer:
            for seed in range(1, chosen.refits + 1):
                model = make_model(shape, seed, device)
                try:
                    refit = measured_refit(trainer, model, next_version(trainer))
                except rolloutfleet.RolloutFleetError:
                    say(fleet.logs())
                    raise
                sampling = rolloutfleet.Sampling(max_new_tokens=TOKENS)
                answer = trainer.generate([PROMPT], [len(PROMPT)], greedy=True, sampling=sampling)
                tokens, logprobs = answer["output_ids"][0][len(PROMPT) :], answer["logprobs"][0][len(PROMPT) :]
                right = disagreement(model, tokens, logprobs)
                wrong = disagreement(make_model(shape, seed + 100, device), tokens, logprobs)
                record.add(
                    **refit.as_run(shape=shape.name),
                    mean_logprob_difference=right,
                    same_with_other_weights=wrong,
                )
                say(f"refit {seed}: {refit.seconds:.2f} s, mean difference {right:.3f}, with other weights {wrong:.3f}")
                if 3 * right >= wrong:
                    raise AssertionError(
                        f"refit {seed}: vLLM's log probabilities are not those of the weights it was given"
                    )
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
