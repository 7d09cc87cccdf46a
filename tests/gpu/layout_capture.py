"""Capture, calibrate and use layouts on one GPU's real vLLM: what goes in place, what takes the detour and why, and how long it takes.

One process for each model; all of them, or those named, by hand::

    PYTHONPATH=client:operator:worker_image python3 tests/gpu/layout_capture.py --output layouts.json [dense tied experts fp8]

Prints one JSON line a model, and ends with 1 when a byte is left unexplained, an element lies elsewhere than the layout says, or a refit
by the layout gives other bytes or tokens than vLLM's loader.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

COMMON = {
    "eos_token_id": 256,
    "bos_token_id": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DENSE = {
    **COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    # The vocabulary is no multiple of what vLLM pads it to.
    "tied": (
        {
            **COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "vocab_size": 128251,
        },
        {},
    ),
    "experts": (
        {
            **COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
        },
        {},
    ),
    "fp8": ({**DENSE, "num_hidden_layers": 8}, {"quantization": "fp8"}),
}
SMALL = {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}
"""In place of a model's own sizes, for a run on a CPU."""


def source_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint of this model, as transformers on its meta device has them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "torch_dtype"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        layer, found, kind = name.partition(".experts.")
        if not found:
            shapes[name] = tuple(parameter.shape)
            continue
        experts, rows, columns = parameter.shape
        for expert in range(experts):
            if kind == "down_proj":
                shapes[f"{layer}.experts.{expert}.down_proj.weight"] = (rows, columns)
            else:
                shapes |= {
                    f"{layer}.experts.{expert}.{part}_proj.weight": (rows // 2, columns) for part in ("gate", "up")
                }
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, device: str) -> dict[str, Any]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        tensors[name] = tensor.mul_(0.1).add_(1) if "norm" in name else tensor.mul_(0.02)
    return tensors


def run(name: str, small: bool) -> dict[str, Any]:
    """What was seen of one model; ``problems`` is empty when all is well."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    from rolloutfleet.contract.manifest import Manifest, TensorSpec
    from rolloutfleet.tiles.copying import CopyTable
    from rolloutfleet_worker.rank.calibration import Calibration
    from rolloutfleet_worker.rank.explaining import explain
    from rolloutfleet_worker.rank.layout_capture import capture_layout
    from rolloutfleet_worker.rank.live_digest import live_digest
    from rolloutfleet_worker.rank.live_tensors import live_parameters
    from rolloutfleet_worker.rank.reload import PartialReload, Reload

    config, options = MODELS[name]
    config = config | ({key: value for key, value in SMALL.items() if key in config} if small else {})
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        enable_prefix_caching=False,
        enforce_eager=True,
        load_format="dummy",
        max_model_len=512,
        skip_tokenizer_init=True,
        **options,
        **({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2 << 30} if cuda else {}),
    )
    worker = engine.llm_engine.model_executor.driver_worker.worker
    model, settings = worker.model_runner.model, worker.vllm_config

    def tokens() -> list[list[int]]:
        prompts = [{"prompt_token_ids": [i * 7 % 250 for i in range(n)]} for n in (5, 40, 300)]
        sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
        return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, sampling, use_tqdm=False)]

    def timed(action: Any, *arguments: Any) -> tuple[Any, float]:
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = action(*arguments)
        if cuda:
            torch.cuda.synchronize()
        return result, round(time.perf_counter() - began, 4)

    def load(tensors: dict[str, Any], calibration: Calibration | None = None) -> None:
        reload = Reload(model, settings)
        for item in tensors.items():
            if calibration is not None:
                calibration.arrived([item])
        reload.load(iter(tensors.items()))
        reload.finish()

    problems: list[str] = []
    shapes = source_shapes(config)
    specs = tuple(TensorSpec(name=key, dtype="bfloat16", shape=shape) for key, shape in shapes.items())
    manifest = Manifest(tensors=specs)
    untouched, before = live_digest(model), tokens()
    captured, first_seconds = timed(capture_layout, model, settings, manifest)
    captured, seconds = timed(capture_layout, model, settings, manifest)
    if (live_digest(model), tokens()) != (untouched, before):
        problems.append("the capture changed the engine")
    problems += [
        f"fault: {fault}" for fault in captured.faults.missing + captured.faults.extra + captured.faults.misshapen
    ]

    values = random_tensors(shapes, 1, device)
    calibration = Calibration(model, captured)
    _, calibrating = timed(load, values, calibration)
    layout, comparing = timed(calibration.finish)
    explained = explain(model, captured, layout)
    problems += explained.unexplained
    live = {key: parameter.data.view(-1) for key, parameter in live_parameters(model)[0] if parameter.is_contiguous()}
    placements = [placement for placement in layout.placements if placement.parameter < len(layout.live)]

    def place(tensors: dict[str, Any]) -> Any:
        flat = [tensor.view(-1) for tensor in tensors.values()]
        entries = []
        for placement in placements:
            target = live[layout.parameters[placement.parameter].name]
            entries.append((flat[placement.source].to(target.dtype), placement.source_block, target, placement.block))
        return CopyTable.build(entries)

    detoured = [detour.source for detour in layout.detours]
    refits = []
    for seed in (2, 3):
        values = random_tensors(shapes, seed, device)
        items = [list(values.items())[source] for source in detoured]

        def detour(items: list[Any] = items) -> None:
            reload = PartialReload(model, settings, captured.modules_of(detoured))
            reload.load(iter(items))
            reload.finish()

        table, building = timed(place, values) if placements else (None, 0.0)
        _, copying = timed(table.run) if table is not None else (None, 0.0)
        _, reloading = timed(detour)
        (digest, digesting), said = timed(live_digest, model), tokens()
        _, whole = timed(load, values)
        if (live_digest(model), tokens()) != (digest, said):
            problems.append(f"the refit of seed {seed} by the layout differs from vLLM's reload")
        refits.append(
            {
                "build_table_seconds": building,
                "copy_seconds": copying,
                "partial_reload_seconds": reloading,
                "live_digest_seconds": digesting,
                "vllm_reload_seconds": whole,
            }
        )
        del table
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "source_tensors": len(shapes),
        "capture_seconds_first": first_seconds,
        "capture_seconds": seconds,
        "calibrated_load_seconds": calibrating,
        "compare_seconds": comparing,
        "layout_bytes": len(layout.encode()),
        "placements": len(placements),
        "placed_bytes": layout.placed_bytes,
        "detoured_bytes": layout.detoured_bytes,
        "filled_bytes": explained.filled,
        "reasons": dict(
            Counter(reason.rpartition(": ")[2] for reason in (d.reason for d in layout.detours)).most_common(8)
        ),
        "refits": refits,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--here", action="store_true", help="in this process, for one model")
    options = parser.parse_args()
    if options.here:
        seen = run(options.models[0], options.small)
        print(f"RESULT {json.dumps(seen)}", flush=True)
        # vLLM's own processes and threads need no farewell.
        os._exit(bool(seen["problems"]))
    results = []
    for name in options.models or MODELS:
        command = [sys.executable, __file__, "--here", name, *(["--small"] if options.small else [])]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line.removeprefix("RESULT ") for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(ran.stdout[-4000:])
        results.append(json.loads(lines[0]) if lines else {"model": name, "problems": [f"ended with {ran.returncode}"]})
        print(json.dumps(results[-1]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return int(any(result["problems"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
