"""What the layout tests do inside a rank's process; each function takes vLLM's worker first, and keeps what it finds on it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from tests.engines.layoutengine import Tensors, manifest_of
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.model_executor.model_loader.reload.meta import capture_layer_to_meta

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout import Block, Layout
from rolloutfleet_worker.rank import in_place
from rolloutfleet_worker.rank.calibration import Calibration
from rolloutfleet_worker.rank.explaining import explain
from rolloutfleet_worker.rank.fresh import FreshLoad, FreshLoadDiffersError
from rolloutfleet_worker.rank.layout_capture import UnsupportedModelError, capture_layout
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.live_tensors import kernel_tensors, live_parameters, live_shape
from rolloutfleet_worker.rank.reload import PartialReload, Reload


def capture(worker: Any, manifest: Manifest) -> tuple[Layout, dict[str, Any]]:
    """The traced layout, and the faults."""
    worker.captured = capture_layout(worker.model_runner.model, worker.vllm_config, manifest)
    return worker.captured.layout, asdict(worker.captured.faults)


def identity(worker: Any) -> dict[str, tuple[int, int, str]]:
    """Object, address and content of every parameter and buffer, each by every name."""
    model = worker.model_runner.model
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {n: (id(t), t.data_ptr(), repr((t.dtype, t.shape, t.stride(), hash(_bytes(t))))) for n, t in tensors.items()}


def load(worker: Any, tensors: Tensors) -> str:
    """A whole reload through vLLM's loader; the live digest afterwards."""
    model = worker.model_runner.model
    reload = Reload(model, worker.vllm_config)
    reload.load(iter(tensors.items()))
    reload.finish()
    return live_digest(model)


def processing(worker: Any, tensors: Tensors) -> dict[str, list[bool]]:
    """For each module that a reload of all tensors, one by one, processes: each time, whether all that feeds it had come."""
    model, sources = worker.model_runner.model, list(tensors.items())
    capture(worker, manifest_of(tensors))
    names = {id(module): name for name, module in model.named_modules()}
    last = {name: source for source in range(len(sources)) for name in worker.captured.modules_of([source])}
    came: list[str] = []
    times: dict[str, list[bool]] = {}
    reload = Reload(model, worker.vllm_config)

    def counting(original: Callable[..., None]) -> Callable[..., None]:
        def counted(self: Any, layer: torch.nn.Module) -> None:
            name = names[id(layer)]
            # A tied head has no tensor of its own, and is packed from the embedding at the end.
            times.setdefault(name, []).append(len(came) > last.get(name, len(sources) - 1))
            original(self, layer)

        return counted

    with ExitStack() as stack:
        methods = (getattr(module, "quant_method", None) for module in model.modules())
        for kind in {type(method) for method in methods if method is not None}:
            original = kind.process_weights_after_loading
            stack.enter_context(mock.patch.object(kind, "process_weights_after_loading", counting(original)))
        for item in sources:
            came.append(item[0])
            reload.load(iter([item]))
        reload.finish()
    return times


def calibrate(worker: Any, tensors: Tensors) -> Layout:
    """Capture, then a whole load with calibration."""
    model = worker.model_runner.model
    capture(worker, manifest_of(tensors))
    calibration = Calibration(model, worker.captured)
    reload = Reload(model, worker.vllm_config)
    calibration.arrived(list(tensors.items()))
    reload.load(iter(tensors.items()))
    reload.finish()
    worker.layout = calibration.finish()
    return worker.layout


def verified(worker: Any) -> Layout:
    return worker.layout


def calibrate_with(worker: Any, tensors: Tensors, patch: str) -> Layout:
    with PATCHES[patch](worker):
        return calibrate(worker, tensors)


def refit(worker: Any, tensors: Tensors, recalibrate: bool) -> tuple[str, list[str]]:
    """Placements written in place, detours through a partial reload; the live digest and the modules that were ever on meta."""
    model, captured, layout = worker.model_runner.model, worker.captured, worker.layout
    values = list(tensors.values())
    for parameter, block, source, source_block in _placements(model, layout):
        target = _view(parameter, block)
        target.copy_(_view(values[source].to(parameter.dtype), source_block).reshape(target.shape))
    detours = [detour.source for detour in layout.detours]
    on_meta: set[str] = set()
    calibration = Calibration(model, captured, layout)
    reload = PartialReload(model, worker.vllm_config, captured.modules_of(detours))
    for source in detours:
        item = list(tensors.items())[source]
        calibration.arrived([item])
        reload.load(iter([item]))
        on_meta |= {name.rpartition(".")[0] for name, p in model.named_parameters() if p.is_meta}
    reload.finish()
    if recalibrate:
        worker.layout = calibration.finish()
    return live_digest(model), sorted(on_meta)


def abandoned(worker: Any, tensors: Tensors) -> bool:
    """Whether a partial reload that ends half way leaves every parameter where and what it was."""
    model, captured = worker.model_runner.model, worker.captured
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters(remove_duplicate=False)}
    modules = captured.modules_of(range(len(captured.manifest.tensors)))
    reload = PartialReload(model, worker.vllm_config, modules)
    reload.load(iter(list(tensors.items())[:3]))
    reload.abandon()
    return before == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters(remove_duplicate=False)}


def explained(worker: Any, which: str) -> tuple[dict[str, Any], int]:
    """The explanation of the traced or the verified layout, and the bytes of all live parameters."""
    model = worker.model_runner.model
    layout = worker.captured.layout if which == "traced" else worker.layout
    return asdict(explain(model, worker.captured, layout)), sum(p.nbytes for _, p in live_parameters(model)[0])


def wrong_elements(worker: Any, tensors: Tensors, which: str) -> list[str]:
    """Placements whose live elements are not the source's, and fills that are not zero."""
    model = worker.model_runner.model
    layout = worker.captured.layout if which == "traced" else worker.layout
    values, names = list(tensors.values()), list(tensors)
    wrong = [
        f"{names[source]} {block}"
        for parameter, block, source, source_block in _placements(model, layout)
        if not torch.equal(
            _view(parameter, block).reshape(-1), _view(values[source].to(parameter.dtype), source_block).reshape(-1)
        )
    ]
    parameters = dict(live_parameters(model)[0])
    fills = worker.captured.fills
    return wrong + [f"{name} {b}" for name, blocks in fills.items() for b in blocks if _view(parameters[name], b).any()]


def taken(worker: Any) -> dict[str, torch.Tensor]:
    """By source tensor, how often each of its elements is placed."""
    specs = worker.captured.manifest.tensors
    counts = {spec.name: torch.zeros(spec.elements, dtype=torch.int8) for spec in specs}
    for _, _, source, block in _placements(worker.model_runner.model, worker.layout):
        _view(counts[specs[source].name], block).add_(1)
    return counts


def attempt(worker: Any, patch: str, manifest: Manifest) -> str:
    """The error of a capture under a patch."""
    with PATCHES[patch](worker):
        try:
            capture(worker, manifest)
        except UnsupportedModelError as error:
            return str(error)
    return ""


def capture_with(worker: Any, patch: str, manifest: Manifest) -> tuple[Layout, dict[str, Any]]:
    with PATCHES[patch](worker):
        return capture(worker, manifest)


def digest(worker: Any, modules: Sequence[str] | None = None) -> str:
    return live_digest(worker.model_runner.model, modules)


def shape(worker: Any) -> str:
    return live_shape(worker.model_runner.model)


def touch(worker: Any, tensor: str, element: int) -> None:
    """Flips the sign of one element."""
    flat = worker.model_runner.model.state_dict()[tensor].view(-1)
    flat[element] = -flat[element]


def fresh(worker: Any, tensors: Tensors, patch: str = "") -> str:
    """What a fresh load of what the rank holds says of it, with detours as they came; empty when it agrees."""
    layout = worker.layout
    load = FreshLoad(worker.model_runner.model, worker.vllm_config, worker.device, worker.captured.manifest)
    load.keep([list(tensors.items())[detour.source] for detour in layout.detours])
    try:
        with PATCHES[patch](worker) if patch else nullcontext():
            load.compare(layout)
    except FreshLoadDiffersError as error:
        return str(error)
    return ""


def lend(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in kernel_tensors(worker.model_runner.model)}


def borrow(worker: Any, tensors: Tensors) -> None:
    own = kernel_tensors(worker.model_runner.model)
    assert [name for name, _ in own] == list(tensors)
    for name, tensor in own:
        tensor.copy_(tensors[name])


def with_cache_scales(worker: Any, manifest: Manifest, dtype: str) -> tuple[list[str], list[str]]:
    """Missing and extra tensors when attention layers take scales from the checkpoint, as vLLM makes them for quantised models."""
    model = worker.model_runner.model
    layers = [layer for name, layer in model.named_modules() if name.endswith(".attn")]
    kept = [(LAYERWISE_INFO[layer].restore_metadata, layer.kv_cache_dtype) for layer in layers]
    try:
        for layer in layers:
            BaseKVCacheMethod(None).create_weights(layer)
            LAYERWISE_INFO[layer].restore_metadata = capture_layer_to_meta(layer)
            layer.kv_cache_dtype = dtype
        faults = capture_layout(model, worker.vllm_config, manifest).faults
        return faults.missing, faults.extra
    finally:
        for layer, (metadata, cache) in zip(layers, kept, strict=True):
            LAYERWISE_INFO[layer].restore_metadata, layer.kv_cache_dtype = metadata, cache
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                delattr(layer, name)


def refuse_zero_scale(worker: Any, tensors: Tensors) -> str:
    reload = PartialReload(worker.model_runner.model, worker.vllm_config, [])
    model = worker.model_runner.model
    with mock.patch.object(type(model), "load_weights", lambda _, tensors: list(tensors)):
        reload.load(iter(tensors.items()))
    try:
        reload.finish()
    except ValueError as error:
        return str(error)
    finally:
        reload.abandon()
    return ""


def _trusting_experts(_: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(in_place, "_experts_reason", return_value=None)


@contextmanager
def _not_prepacking(worker: Any) -> Iterator[None]:
    """Experts left as the loader puts them, as Triton's kernel takes them; the CPU's would compute nonsense from that."""
    with (
        _trusting_experts(worker),
        mock.patch.object(CPUUnquantizedExperts, "process_weights_after_loading", return_value=None),
    ):
        yield


def _permuting(_: Any) -> AbstractContextManager[Any]:
    """Post-processing that turns the rows of every output projection round, and says nothing."""
    original = UnquantizedLinearMethod.process_weights_after_loading

    def processed(self: Any, layer: torch.nn.Module) -> None:
        if layer.prefix.endswith("o_proj"):
            layer.weight.data.copy_(layer.weight.data.flip(0))
        original(self, layer)

    return mock.patch.object(UnquantizedLinearMethod, "process_weights_after_loading", processed)


def _with_loader(loader: Callable[..., None]) -> Callable[[Any], AbstractContextManager[Any]]:
    """Another loader for the first layer's input norm."""

    def patch(worker: Any) -> AbstractContextManager[Any]:
        layer = worker.model_runner.model.model.layers[0].input_layernorm
        info = LAYERWISE_INFO[layer]
        return mock.patch.object(info.restore_metadata[0]["weight"], "weight_loader", loader, create=True)

    return patch


def _composed(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)
    param.data.copy_(-torch.exp(param.data))


def _multiplying(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded * 2)


def _halved(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data[: param.shape[0] // 2].copy_(loaded[: param.shape[0] // 2])


def _twice(param: torch.Tensor, loaded: torch.Tensor) -> None:
    param.data.copy_(loaded)
    param.data[1:].copy_(loaded[:-1])


def _raising(param: torch.Tensor, loaded: torch.Tensor) -> None:
    raise RuntimeError("this loader ends half way")


@contextmanager
def _scaling(worker: Any) -> Iterator[None]:
    """A scale that a load computes and no checkpoint holds, as online quantization leaves it on its modules."""
    module = worker.model_runner.model.get_submodule("model.layers.0.self_attn.o_proj")
    module.register_parameter("weight_scale", torch.nn.Parameter(torch.ones(1), requires_grad=False))
    try:
        yield
    finally:
        del module.weight_scale


def _balancing(worker: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(worker.vllm_config.parallel_config, "enable_eplb", True)


PATCHES: Mapping[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "trusting experts": _trusting_experts,
    "not prepacking": _not_prepacking,
    "permuting": _permuting,
    "composed": _with_loader(_composed),
    "multiplying": _with_loader(_multiplying),
    "halved": _with_loader(_halved),
    "twice": _with_loader(_twice),
    "raising": _with_loader(_raising),
    "scaling": _scaling,
    "balancing": _balancing,
}


def _placements(model: torch.nn.Module, layout: Layout) -> list[tuple[torch.Tensor, Block, int, Block]]:
    parameters = dict(live_parameters(model)[0])
    return [
        (parameters[layout.parameters[p.parameter].name].data, p.block, p.source, p.source_block)
        for p in layout.placements
        if p.parameter < len(layout.live)
    ]


def _view(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """The block's elements in its order."""
    flat = tensor.detach().contiguous().view(-1) if not tensor.is_contiguous() else tensor.detach().view(-1)
    return flat.as_strided((block.rows, block.run), (block.stride, 1), flat.storage_offset() + block.offset)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
