"""The command line of ``vllm serve``."""

from rolloutfleet.contract.names import GENERATION_PORT
from rolloutfleet_operator.api.engine import LoraSpec
from rolloutfleet_operator.api.fleet import RolloutFleetSpec
from rolloutfleet_operator.api.model import Dtype, LoadFormat

MODEL_PATH = "/models/model"
"""Where a model that is not from the hub is mounted."""

_LOAD_FORMATS = {LoadFormat.AUTO: "auto", LoadFormat.DUMMY: "dummy"}
_DTYPES = {Dtype.AUTO: "auto", Dtype.BFLOAT16: "bfloat16", Dtype.FLOAT16: "float16", Dtype.FLOAT32: "float32"}


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank."""


def render_arguments(spec: RolloutFleetSpec) -> list[str]:
    """The model, then the operator's arguments, then the user's sorted by name."""
    model = spec.model
    local = model.source is not None and model.source.local
    own = {
        "served-model-name": spec.served_name,
        "tensor-parallel-size": str(spec.parallelism.tensor),
        **_further_axes(spec),
        "port": str(GENERATION_PORT),
        "load-format": _LOAD_FORMATS[model.load_format],
        "dtype": _DTYPES[model.dtype],
    }
    if model.max_model_length is not None:
        own["max-model-len"] = str(model.max_model_length)
    if model.revision is not None:
        own["revision"] = model.revision
    arguments = [MODEL_PATH if local else model.name]
    arguments += [f"--{key}={value}" if value else f"--{key}" for key, value in own.items()]
    if spec.engine.lora is not None:
        arguments += _lora_arguments(spec.engine.lora)
    # A dotted name always gets its "=": without one, vLLM would take the next argument for its value.
    arguments += [
        f"--{key}={value}" if value or "." in key else f"--{key}" for key, value in sorted(spec.engine.args.items())
    ]
    return arguments


def _further_axes(spec: RolloutFleetSpec) -> dict[str, str]:
    """Pods of an engine are told apart by their launchers; these are equal on all."""
    sizes, axes = spec.parallelism, {}
    if sizes.pipeline > 1:
        axes["pipeline-parallel-size"] = str(sizes.pipeline)
    if sizes.data > 1:
        axes["data-parallel-size"] = str(sizes.data)
    if sizes.expert > 1 and "enable-expert-parallel" not in spec.engine.args:
        axes["enable-expert-parallel"] = ""
    return axes


def _lora_arguments(lora: LoraSpec) -> list[str]:
    """Two slots for each adapter: the version of requests in flight, and the next one."""
    rank = next(rank for rank in _LORA_RANKS if rank >= lora.max_rank)
    arguments = ["--enable-lora", f"--max-lora-rank={rank}", f"--max-loras={2 * lora.max_adapters}"]
    if lora.target_modules:
        arguments += ["--lora-target-modules", *sorted(lora.target_modules)]
    return arguments
