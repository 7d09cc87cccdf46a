"""Refit a real vLLM engine over a real transport on one machine, without Kubernetes, and hold its tokens against transformers.

Starts the launcher (with stock vLLM) and the sync job as the pods would, refits three times, and writes what it saw as JSON. On one GPU the
trainer and the engine share it: two values of NCCL_HOSTID let NCCL take them for two hosts, so bytes cross its network transport over
loopback. That proves the path, not its speed. On two GPUs the engine has the first and the trainer the second. By hand::

    PYTHONPATH=client:operator:worker_image python3 tests/gpu/native_refit.py --model MODEL --transport Native --output native.json
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rolloutfleet

TOKEN = "by-hand"
PROMPT = list(range(40, 72))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(stack: ExitStack, log: Path, command: list[str], **environment: str) -> None:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=log.open("w"), stderr=subprocess.STDOUT
    )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


def await_ready(url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.URLError:
            time.sleep(1)
    raise SystemExit(f"{url} was not there within {seconds:g} s\n{log.read_text()[-6000:]}")


def start_fleet(stack: ExitStack, folder: Path, options: argparse.Namespace) -> str:
    """One engine and its sync job; the sync job's URL."""
    generation, sync = free_port(), free_port()
    control = generation + 1
    (folder / "token").write_text(TOKEN)
    member = {"engine": 0, "podName": "by-hand-0", "podUid": "pod", "address": f"127.0.0.1:{control}", "ranks": 1}
    roster = {"fleet": "by-hand", "fleetUid": "fleet", "engines": 1, "members": [member]}
    (folder / "roster.json").write_text(json.dumps(roster))
    start(
        stack,
        folder / "engine.log",
        [
            sys.executable,
            "-m",
            "rolloutfleet_worker",
            "--",
            options.model,
            "--served-model-name=by-hand",
            *options.vllm,
        ],
        ROLLOUTFLEET_FLEET="by-hand",
        ROLLOUTFLEET_FLEET_UID="fleet",
        ROLLOUTFLEET_POD_NAME="by-hand-0",
        ROLLOUTFLEET_POD_UID="pod",
        ROLLOUTFLEET_ENGINE="0",
        ROLLOUTFLEET_TOKEN_FILE=str(folder / "token"),
        ROLLOUTFLEET_GENERATION_PORT=str(generation),
        ROLLOUTFLEET_CONTROL_PORT=str(control),
        ROLLOUTFLEET_RUNTIME_DIRECTORY=str(folder),
        ROLLOUTFLEET_AWAIT_FIRST_REFIT="true",
        **({"CUDA_VISIBLE_DEVICES": "0"} if torch.cuda.device_count() > 1 else {"NCCL_HOSTID": "engine"}),
    )
    start(
        stack,
        folder / "sync.log",
        [
            *(sys.executable, "-m", "rolloutfleet_sync", "--roster", str(folder / "roster.json")),
            *("--status", str(folder / "status.json"), "--token-file", str(folder / "token"), "--model=by-hand"),
            *("--port", str(sync), "--policy", json.dumps({"transport": options.transport})),
        ],
    )
    await_ready(f"http://127.0.0.1:{control}/healthz/started", folder / "engine.log", 400)
    await_ready(f"http://127.0.0.1:{sync}/healthz", folder / "sync.log", 30)
    return f"http://127.0.0.1:{sync}"


def disagreement(model: torch.nn.Module, prompt: list[int], tokens: list[int], logprobs: list[float]) -> float:
    """Mean difference of the log probabilities that vLLM and transformers give to vLLM's tokens."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    positions = range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    wanted = [float(scores[position, token]) for position, token in zip(positions, tokens, strict=True)]
    return sum(abs(a - b) for a, b in zip(wanted, logprobs, strict=True)) / len(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--transport", choices=("Native", "Gloo"), default="Native")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--refits", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("vllm", nargs="*", help="arguments of vllm serve, after --")
    options = parser.parse_args()
    device = "cpu"
    if options.transport == "Native":
        device = f"cuda:{torch.cuda.device_count() - 1}"
        torch.cuda.set_device(device)
        if torch.cuda.device_count() == 1:
            os.environ["NCCL_HOSTID"] = "trainer"
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        address = start_fleet(stack, Path(folder), options)
        fleet = stack.enter_context(rolloutfleet.connect(address, token=TOKEN))
        config = AutoConfig.from_pretrained(options.model)
        for version in range(1, options.refits + 1):
            torch.manual_seed(version)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
            try:
                result = fleet.refit(model, version=version)
            except rolloutfleet.RolloutFleetError:
                print(
                    (Path(folder) / "engine.log").read_text()[-6000:], (Path(folder) / "sync.log").read_text()[-3000:]
                )
                raise
            sampling = rolloutfleet.Sampling(max_new_tokens=12)
            answer = fleet.generate([PROMPT], [len(PROMPT)], greedy=True, sampling=sampling)
            tokens = answer["output_ids"][0][len(PROMPT) :]
            difference = disagreement(model, PROMPT, tokens, answer["logprobs"][0][len(PROMPT) :])
            torch.manual_seed(version + 100)
            with torch.device(device):
                other = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
            wrong = disagreement(other, PROMPT, tokens, answer["logprobs"][0][len(PROMPT) :])
            del model, other
            runs.append(
                {
                    **json.loads(result.model_dump_json()),
                    "mean_logprob_difference": difference,
                    "same_with_other_weights": wrong,
                }
            )
            print(json.dumps(runs[-1]), flush=True)
    right = all(3 * run["mean_logprob_difference"] < run["same_with_other_weights"] for run in runs)
    machine = "cpu" if device == "cpu" else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    report = {
        "name": "native_refit",
        "command": " ".join(["python3", *sys.argv]),
        "machine": machine,
        "torch": torch.__version__,
        "right": right,
        "runs": runs,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
