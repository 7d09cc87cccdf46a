"""Whether a virtual GPU layer sits between the engine and CUDA: NCCL hangs behind it, without a word."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

PRELOAD_FILE: Final = Path("/etc/ld.so.preload")
_LIBRARIES: Final = ("libvgpu.so", "libcuda-control.so")
"""Libraries that are loaded into every process to slice a GPU."""
_LIMITS: Final = ("CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT")
_SWITCHED_OFF: Final = "CUDA_DISABLE_CONTROL"


def find_virtual_gpu(environment: Mapping[str, str], preload: Path = PRELOAD_FILE) -> str:
    """What shows that the GPU is a slice, and what to do about it; empty when nothing does, or the layer is switched off."""
    if environment.get(_SWITCHED_OFF, "").lower() == "true":
        return ""
    loaded = environment.get("LD_PRELOAD", "") + (preload.read_text() if preload.is_file() else "")
    signs = [f"{library} is loaded into every process" for library in _LIBRARIES if library in loaded]
    signs += [f"{name} is set" for name in sorted(environment) if name.startswith(_LIMITS)]
    if not signs:
        return ""
    return (
        f"the pod's GPU is a slice of a virtual GPU layer ({'; '.join(signs)}), behind which NCCL hangs: give engines whole GPUs, "
        f"or set engine.env {_SWITCHED_OFF}=true where the layer allows that"
    )
