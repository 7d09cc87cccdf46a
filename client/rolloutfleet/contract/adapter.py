"""Adapters (LoRA) that are given to a fleet on top of its base weights: what of PEFT's configuration travels with the tensors."""

import hashlib
import re
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

NAME_PATTERN: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_VERSIONED: Final = re.compile(r".*-v\d+")


class AdapterSpec(BaseModel):
    """A low-rank adapter without its tensors: the part of PEFT's ``adapter_config.json`` that vLLM computes with."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    name: str
    """Requests name it as their model."""
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    target_modules: tuple[str, ...] = ()
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    """Rank of modules that differ, by the end of their name or a pattern for it, as PEFT matches it."""
    alpha_pattern: dict[str, float] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _fit_for_requests_and_folders(cls, name: str) -> str:
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(
                f"adapter {name!r}: a name is up to 63 letters, digits, dots, dashes and underscores, and begins and ends with a "
                "letter or digit"
            )
        if _VERSIONED.fullmatch(name):
            raise ValueError(f"adapter {name!r}: a name must not end like a version (-v and digits)")
        return name

    def peft_config(self) -> dict[str, Any]:
        """The content of ``adapter_config.json``."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "bias": "none",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "use_rslora": self.use_rslora,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }


class HeldAdapter(BaseModel):
    """An adapter that an engine serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    spec: AdapterSpec
    version: int = Field(ge=1)
    """The fleet's weight version that brought it."""
    nbytes: int = Field(ge=0)
    """Of its file of tensors."""
    sha256: str
    """Of the same file."""


def versioned_name(name: str, version: int) -> str:
    """The name under which vLLM knows one version of an adapter, and requests may pin it."""
    return f"{name}-v{version}"


def manifest_key(manifest_digest: str, adapter: AdapterSpec | None) -> str:
    """What workers keep a checked manifest under: its digest, or one over it and the adapter that its tensors are."""
    if adapter is None:
        return manifest_digest
    return hashlib.sha256(f"{manifest_digest}\n{adapter.model_dump_json()}".encode()).hexdigest()
