"""The proof that a layout leaves no byte of any parameter out: what writes each, or a sentence for what nothing writes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rolloutfleet.layout import Block, Layout
from rolloutfleet_worker.rank.layout_capture import Captured
from rolloutfleet_worker.rank.live_tensors import live_parameters


@dataclass(frozen=True, slots=True)
class Explained:
    """Bytes of all live parameters, tied ones once, by what brings a new version into them."""

    placed: int
    """Written in place."""
    filled: int
    """Set to one value by the loader, and not part of any version: padding."""
    loaded: int
    """In modules that vLLM's loader reloads."""
    through_loader: Mapping[str, str]
    """Why, by parameter; also those that a kernel has packed out of sight."""
    unexplained: tuple[str, ...]
    """Sentences; empty for a layout that is whole."""


def explain(model: torch.nn.Module, captured: Captured, layout: Layout) -> Explained:
    """How a refit by this layout reaches every parameter, found by marking each element that it writes."""
    parameters, first = live_parameters(model)
    reasons: dict[int, str] = {}
    for detour in layout.detours:
        for module in captured.modules_of([detour.source]):
            reasons.setdefault(id(model.get_submodule(module)), detour.reason)
    # A module may be known by several names.
    through_loader = {
        f"{name}.{leaf}": reasons[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        for leaf, parameter in module._parameters.items()
        if parameter is not None and id(module) in reasons
    }
    loaded_names = {first[name] for name in through_loader if name in first}
    blocks: dict[str, list[Block]] = {parameter.name: [] for parameter in layout.live}
    for placement in layout.placements:
        if placement.parameter < len(layout.live):
            blocks[layout.parameters[placement.parameter].name].append(placement.block)
    placed = filled = loaded = 0
    unexplained = [
        f"{name} is empty, and nothing loads its module"
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.numel() and name not in through_loader
    ]
    for name, parameter in parameters:
        written, fills = blocks.pop(name, []), captured.fills.get(name, ())
        if name in loaded_names and not written:
            loaded += parameter.nbytes
            continue
        marks = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
        for block in (*written, *fills):
            marks.as_strided((block.rows, block.run), (block.stride, 1), block.offset).add_(1)
        wrong = {"nothing": int((marks == 0).sum()), "more than one placement": int((marks > 1).sum())}
        unexplained += [
            f"{name}: {what} writes {count} of {marks.numel()} elements" for what, count in wrong.items() if count
        ]
        if name in loaded_names:
            unexplained.append(f"{name} is written in place and by the loader")
        placed += sum(block.elements for block in written) * parameter.element_size()
        filled += sum(block.elements for block in fills) * parameter.element_size()
    unexplained += [f"{name} is placed, but is no live parameter" for name in blocks]
    return Explained(placed, filled, loaded, through_loader, tuple(sorted(unexplained)))
