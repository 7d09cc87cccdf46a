"""A small model as a trainer keeps it and as tensor-parallel ranks hold it: fused, sliced, padded, cast; torch itself cuts the oracle."""

from dataclasses import dataclass

import torch

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout.blocks import Block, pair, region
from rolloutfleet.layout.layout import Layout, Parameter, Placement, build_layout

HIDDEN, HEADS, KEYS, FFN, EXPERT, EXPERTS, VOCABULARY, PADDED = 64, 64, 32, 96, 48, 4, 100, 128

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "embed": ((VOCABULARY, HIDDEN), "bfloat16"),
    "q": ((HEADS, HIDDEN), "bfloat16"),
    "k": ((KEYS, HIDDEN), "bfloat16"),
    "v": ((KEYS, HIDDEN), "bfloat16"),
    "gate": ((FFN, HIDDEN), "bfloat16"),
    "up": ((FFN, HIDDEN), "bfloat16"),
    "down": ((HIDDEN, FFN), "bfloat16"),
    "norm": ((HIDDEN,), "float32"),
    "odd": ((17, 3), "float32"),
    "scale": ((), "float32"),
    **{
        f"experts.{expert}.{name}": (shape, "bfloat16")
        for expert in range(EXPERTS)
        for name, shape in (("w1", (EXPERT, HIDDEN)), ("w2", (HIDDEN, EXPERT)), ("w3", (EXPERT, HIDDEN)))
    },
}
DETOURED = ("odd", "scale")


def manifest() -> Manifest:
    return Manifest(
        tensors=tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, (shape, dtype) in SHAPES.items())
    )


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for name, (shape, dtype) in SHAPES.items()
    }


def live(tensors: dict[str, torch.Tensor], shard: int, count: int) -> dict[str, torch.Tensor]:
    """What shard ``shard`` of ``count`` computes with, cut by torch from whole tensors; padding is zero."""

    def rows(name: str) -> torch.Tensor:
        return tensors[name].chunk(count, 0)[shard]

    def columns(name: str) -> torch.Tensor:
        return tensors[name].chunk(count, 1)[shard]

    padded = torch.nn.functional.pad(tensors["embed"], (0, 0, 0, PADDED - VOCABULARY))
    return {
        "embed": padded.chunk(count, 0)[shard],
        "qkv": torch.cat([rows("q"), rows("k"), rows("v")]),
        "gate_up": torch.cat([rows("gate"), rows("up")]),
        "down": columns("down").contiguous(),
        "norm": tensors["norm"].to(torch.bfloat16),
        "w13": torch.stack([torch.cat([rows(f"experts.{e}.w1"), rows(f"experts.{e}.w3")]) for e in range(EXPERTS)]),
        "w2": torch.stack([columns(f"experts.{e}.w2") for e in range(EXPERTS)]).contiguous(),
    }


@dataclass
class _Drawing:
    """Collects placements; every source slice is a box, every destination the next elements of a parameter."""

    names: tuple[str, ...]
    placements: list[Placement]
    parameter: int = 0
    filled: int = 0

    def take(self, name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        blocks = region(SHAPES[name][0], starts, sizes)
        elements = sum(block.elements for block in blocks)
        if elements:
            for source, place in pair(blocks, (Block.contiguous(self.filled, elements),)):
                self.placements.append(Placement(self.names.index(name), source, self.parameter, place))
        self.filled += elements

    def rows(self, name: str, shard: int, count: int) -> None:
        size, width = SHAPES[name][0][0] // count, SHAPES[name][0][1]
        self.take(name, (shard * size, 0), (size, width))

    def columns(self, name: str, shard: int, count: int) -> None:
        height, size = SHAPES[name][0][0], SHAPES[name][0][1] // count
        self.take(name, (0, shard * size), (height, size))

    def next_parameter(self) -> None:
        self.parameter, self.filled = self.parameter + 1, 0


def layout(shard: int, count: int) -> Layout:
    """The layout of shard ``shard`` of ``count``, with the tensors of :data:`DETOURED` through the loader."""
    names = tuple(SHAPES)
    drawing = _Drawing(names, [])
    size = PADDED // count
    start = min(shard * size, VOCABULARY)
    drawing.take("embed", (start, 0), (min(size, VOCABULARY - start), HIDDEN))
    drawing.next_parameter()
    for group in (("q", "k", "v"), ("gate", "up")):
        for name in group:
            drawing.rows(name, shard, count)
        drawing.next_parameter()
    drawing.columns("down", shard, count)
    drawing.next_parameter()
    drawing.take("norm", (0,), (HIDDEN,))
    drawing.next_parameter()
    for expert in range(EXPERTS):
        drawing.rows(f"experts.{expert}.w1", shard, count)
        drawing.rows(f"experts.{expert}.w3", shard, count)
    drawing.next_parameter()
    for expert in range(EXPERTS):
        drawing.columns(f"experts.{expert}.w2", shard, count)
    shapes = live(weights(0), shard, count)
    parameters = [Parameter(name, "bfloat16", tensor.numel()) for name, tensor in shapes.items()]
    detours = {names.index(name): "made for a test" for name in DETOURED}
    return build_layout(manifest(), parameters, drawing.placements, detours, f"shard {shard} of {count}")
