"""From PEFT's configuration of an adapter to what a fleet needs to know of it."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from rolloutfleet.contract.adapter import AdapterSpec

_PLAIN_STARTS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga", "true", "false"})
"""Ways to initialise an adapter that leave the base weights as they are."""

_UNSUPPORTED: Final = (
    "alora_invocation_tokens",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)


def adapter_spec(name: str, config: Any) -> AdapterSpec:
    """The adapter that a ``peft.LoraConfig``, or the mapping in its ``adapter_config.json``, describes.

    Raises TypeError for anything else, ValueError naming every setting that engines do not compute, and a name that cannot be used.
    """
    settings = _settings(config)
    faults = [f"{key} is {settings[key]!r}" for key in _UNSUPPORTED if settings.get(key)]
    kind = str(getattr(settings.get("peft_type"), "value", settings.get("peft_type", "LORA")))
    if kind != "LORA":
        faults.append(f"peft_type is {kind}")
    if settings.get("bias", "none") != "none":
        faults.append(f"bias is {settings['bias']!r}")
    start = settings.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        faults.append(f"init_lora_weights is {start!r}, which changes the base weights")
    if faults:
        raise ValueError(f"adapter {name}: engines serve plain LoRA alone, but {'; '.join(faults)}")
    missing = [key for key in ("r", "lora_alpha") if settings.get(key) is None]
    if missing:
        raise ValueError(f"adapter {name}: config lacks {', '.join(missing)}")
    try:
        return AdapterSpec(
            name=name,
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            target_modules=_modules(settings.get("target_modules")),
            use_rslora=bool(settings.get("use_rslora")),
            rank_pattern=dict(settings.get("rank_pattern") or {}),
            alpha_pattern=dict(settings.get("alpha_pattern") or {}),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"adapter {name}: {field}: {first['msg'].removeprefix('Value error, ')}") from error


def _settings(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        settings = to_dict()
        if isinstance(settings, Mapping):
            return settings
    raise TypeError(
        f"config is a {type(config).__name__}; pass a peft.LoraConfig, or its adapter_config.json as a mapping"
    )


def _modules(given: Any) -> tuple[str, ...]:
    """PEFT takes a list, a set, or one pattern; engines go by the tensors' names."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(sorted(map(str, given)))
