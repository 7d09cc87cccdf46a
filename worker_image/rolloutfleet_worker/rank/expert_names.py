"""What checkpoints call the weights that vLLM keeps fused, all experts of a layer in one parameter."""

from collections.abc import Set as AbstractSet

import torch

_LORA = "base_layer."


class ExpertNames:
    """The names by parameter, as vLLM's own loader maps them; parameters that hold no experts have none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._blocks: dict[str, set[str]] = {}
        self._single: dict[str, set[str]] = {}
        self._parts: dict[str, set[str]] = {}
        for name, _ in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            layer, found, _ = f"{owner}.".partition(".experts.")
            mapping = getattr(model.get_submodule(owner), "get_expert_mapping", None) if found else None
            if mapping is None:
                continue
            everything = mapping(include_fused=True)
            self._parts[layer] = {part.removesuffix(_LORA) for _, part, *_ in everything}
            self._blocks[name] = {f"{layer}.{part}" for whole, part, *_ in everything if whole == f"experts.{leaf}"}
            self._single[name] = {
                f"{layer}.{part}{f'experts.{leaf}'.removeprefix(whole)}"
                for whole, part, *_ in mapping(include_fused=False)
                if f"experts.{leaf}".startswith(whole)
            }

    def names(self, parameter: str) -> AbstractSet[str]:
        """Every name under which the parameter, or a part of it, may come."""
        return self._blocks.get(parameter, set()) | self._single.get(parameter, set())

    def absent(self, parameter: str, given: AbstractSet[str]) -> AbstractSet[str]:
        """Names that are not given and would fill the parameter, of the kind that the manifest uses."""
        blocks, single = self._blocks.get(parameter, set()), self._single.get(parameter, set())
        in_blocks = blocks & given or (not single & given and any(other & given for other in self._blocks.values()))
        return (blocks if in_blocks else single) - given

    def is_unknown(self, tensor: str) -> bool:
        """Whether the name is that of an expert which its layer does not have: vLLM's loader skips it without a word."""
        layer, found, rest = tensor.partition(".experts.")
        if not found or layer not in self._parts:
            return False
        first, _, more = rest.partition(".")
        return self._parts[layer].isdisjoint({f"experts.{first}", f"experts.{first}.{more.partition('.')[0]}."})
