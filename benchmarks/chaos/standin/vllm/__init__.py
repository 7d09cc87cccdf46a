"""A stand-in for vLLM: engines that hold weights and answer with their checksum.

It has what the worker's code calls while an unquantised model without adapters is refitted. Everything of the fleet runs unchanged on top:
the launcher, the middleware, the control thread of each rank, capture of the layout, calibration, staging, transfers and loans. Any other
name of vLLM's can be imported too: it is a class that nothing is an instance of, and that says so when it is called.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

__version__ = "0.32.0"

_HERE = Path(__file__).parent


class _Platform:
    device_type = "cpu"
    device_name = "cpu"

    def is_cpu(self) -> bool:
        return True

    def is_cuda(self) -> bool:
        return False


class _AttentionImplBase:
    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Nothing is derived here."""


class _TransferInfo:
    """What vLLM would parse from a request."""


class _TransferEngine:
    """The base of the fleet's transfer engine, as far as it is used."""

    update_info_cls: type = _TransferInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def parse_update_info(self, update_info: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_info)


@contextmanager
def _current_config(_: Any) -> Iterator[None]:
    yield


def _to_meta(tensor: Any) -> Any:
    meta = tensor.data.to("meta")
    meta.__class__ = tensor.__class__
    meta.__dict__ = tensor.__dict__.copy()
    return meta


def _nothing(*_: Any) -> None:
    return None


_RELOAD = "vllm.model_executor.model_loader.reload"
_MEMBERS: dict[str, dict[str, Any]] = {
    "vllm.config": {"set_current_vllm_config": _current_config},
    "vllm.platforms": {"current_platform": _Platform()},
    # Its ranks form no groups among themselves.
    "vllm.distributed": {"parallel_state": SimpleNamespace(model_parallel_is_initialized=lambda: False)},
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine": _TransferEngine,
        "WeightTransferInitInfo": _TransferInfo,
        "WeightTransferUpdateInfo": _TransferInfo,
    },
    "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda _: False},
    _RELOAD: {"finalize_layerwise_reload": _nothing, "initialize_layerwise_reload": _nothing},
    f"{_RELOAD}.layerwise": {
        "LAYERWISE_INFO": WeakKeyDictionary(),
        "_get_original_loader": lambda tensor: tensor.weight_loader,
    },
    f"{_RELOAD}.meta": {"SKIP_MODULES": frozenset(), "SKIP_TENSORS": frozenset(), "to_meta_tensor": _to_meta},
    f"{_RELOAD}.sanitize": {"restore_layer_refs": lambda tensor, _: tensor},
    f"{_RELOAD}.utils": {
        "get_layer_tensors": lambda layer: {**layer._parameters, **layer._buffers},
        "get_tensor_load_numel": lambda tensor: tensor.numel(),
    },
    "vllm.v1.attention.backend": {"AttentionImplBase": _AttentionImplBase},
}


def _absent(name: str) -> type:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the stand-in for vLLM has no {name}; give it one in {__file__}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse})


class _Modules(MetaPathFinder, Loader):
    """Makes every module below vllm that is not a file here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not fullname.startswith("vllm.") or (_HERE / fullname.split(".")[1]).exists():
            return None
        if (_HERE / f"{fullname.split('.')[1]}.py").exists():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_MEMBERS.get(module.__name__, {}))
        known: dict[str, type] = {}

        def absent(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return known.setdefault(name, _absent(f"{module.__name__}.{name}"))

        module.__dict__["__getattr__"] = absent


sys.meta_path.insert(0, _Modules())
