"""Manifests and layouts of real models' shapes, as vLLM lays them out: fused qkv and gate-up, experts as w13 and w2."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout import Block, Layout, Parameter, Placement, build_layout, region


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen-like decoder."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    """0 for a dense model; of a mixture ``intermediate`` is the size of one expert."""
    qkv_bias: bool = False
    qk_norm: bool = False


QWEN2_7B = ModelShape(3584, 28, 18944, 28, 4, 128, 152064, qkv_bias=True)
QWEN3_30B_A3B = ModelShape(2048, 48, 768, 32, 4, 128, 151936, experts=128, qk_norm=True)
TINY_DENSE = ModelShape(16, 2, 24, 4, 2, 4, 40, qkv_bias=True)
TINY_MIXTURE = ModelShape(8, 2, 6, 2, 2, 4, 20, experts=4, qk_norm=True)


@dataclass
class _Drawing:
    """Collects tensors, parameters and placements of one rank of a tensor parallel group."""

    dtype: str
    rank: int
    ranks: int
    specs: list[TensorSpec] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)

    def tensor(self, name: str, shape: Sequence[int]) -> int:
        self.specs.append(TensorSpec(name=name, dtype=self.dtype, shape=tuple(shape)))
        return len(self.specs) - 1

    def fused(self, name: str, sources: Sequence[tuple[int, int | None]]) -> None:
        """A parameter that is the rank's slices (source, cut dimension) one after another."""
        offset = 0
        for source, dim in sources:
            for block in self.slice_of(source, dim):
                destination = Block.contiguous(offset, block.elements)
                self.placements.append(Placement(source, block, len(self.parameters), destination))
                offset += block.elements
        self.parameters.append(Parameter(name, self.dtype, offset))

    def slice_of(self, source: int, dim: int | None) -> tuple[Block, ...]:
        shape = self.specs[source].shape
        starts, sizes = [0] * len(shape), list(shape)
        if dim is not None:
            assert shape[dim] % self.ranks == 0
            sizes[dim] //= self.ranks
            starts[dim] = self.rank * sizes[dim]
        return region(shape, starts, sizes)


def model_layout(shape: ModelShape, dtype: str = "bfloat16", rank: int = 0, ranks: int = 1) -> tuple[Manifest, Layout]:
    """The checkpoint's tensors in the order of its layers, and where one tensor parallel rank has them."""
    drawing = _Drawing(dtype, rank, ranks)
    hidden, width, kv_width = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    embedding = drawing.tensor("model.embed_tokens.weight", (shape.vocabulary, hidden))
    drawing.fused("model.embed_tokens.weight", [(embedding, 0)])
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        projections = [("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)]
        qkv = [drawing.tensor(f"{at}.self_attn.{name}.weight", (size, hidden)) for name, size in projections]
        drawing.fused(f"{at}.self_attn.qkv_proj.weight", [(source, 0) for source in qkv])
        if shape.qkv_bias:
            bias = [drawing.tensor(f"{at}.self_attn.{name}.bias", (size,)) for name, size in projections]
            drawing.fused(f"{at}.self_attn.qkv_proj.bias", [(source, 0) for source in bias])
        output = drawing.tensor(f"{at}.self_attn.o_proj.weight", (hidden, width))
        drawing.fused(f"{at}.self_attn.o_proj.weight", [(output, 1)])
        for norm in ("self_attn.q_norm", "self_attn.k_norm") if shape.qk_norm else ():
            drawing.fused(f"{at}.{norm}.weight", [(drawing.tensor(f"{at}.{norm}.weight", (shape.head_dim,)), None)])
        _add_mlp(drawing, shape, f"{at}.mlp")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            drawing.fused(f"{at}.{norm}.weight", [(drawing.tensor(f"{at}.{norm}.weight", (hidden,)), None)])
    drawing.fused("model.norm.weight", [(drawing.tensor("model.norm.weight", (hidden,)), None)])
    head = drawing.tensor("lm_head.weight", (shape.vocabulary, hidden))
    drawing.fused("lm_head.weight", [(head, 0)])
    manifest = Manifest(tensors=tuple(drawing.specs))
    return manifest, build_layout(manifest, drawing.parameters, drawing.placements, {}, shape="synthetic")


def _add_mlp(drawing: _Drawing, shape: ModelShape, at: str) -> None:
    if not shape.experts:
        gate, up = (
            drawing.tensor(f"{at}.{name}.weight", (shape.intermediate, shape.hidden))
            for name in ("gate_proj", "up_proj")
        )
        drawing.fused(f"{at}.gate_up_proj.weight", [(gate, 0), (up, 0)])
        down = drawing.tensor(f"{at}.down_proj.weight", (shape.hidden, shape.intermediate))
        drawing.fused(f"{at}.down_proj.weight", [(down, 1)])
        return
    router = drawing.tensor(f"{at}.gate.weight", (shape.experts, shape.hidden))
    drawing.fused(f"{at}.gate.weight", [(router, None)])
    gate_up: list[tuple[int, int | None]] = []
    down_projections: list[tuple[int, int | None]] = []
    for expert in range(shape.experts):
        for name, cut in (("gate_proj", 0), ("up_proj", 0)):
            source = drawing.tensor(f"{at}.experts.{expert}.{name}.weight", (shape.intermediate, shape.hidden))
            gate_up.append((source, cut))
        source = drawing.tensor(f"{at}.experts.{expert}.down_proj.weight", (shape.hidden, shape.intermediate))
        down_projections.append((source, 1))
    drawing.fused(f"{at}.experts.w13_weight", gate_up)
    drawing.fused(f"{at}.experts.w2_weight", down_projections)
