"""Which memory a process can share with others: words to compare, and names of devices. Needs no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rolloutfleet.contract.worker import Locality

if TYPE_CHECKING:
    import torch

CPU: Final = "cpu"

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - POSIX shared memory is what is meant

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_IPC_NAMESPACE: Final = Path("/proc/self/ns/ipc")


def locality() -> Locality:
    """This process's words: an empty one where the system does not tell, and that is equal to nobody's, not even to another empty one.

    CUDA's handles are opened within one IPC namespace. Files of ``/dev/shm`` know none: whoever has the same file system mounted there,
    be it another container of the pod, sees them.
    """
    return Locality(host=_word(lambda: _IPC_NAMESPACE.stat().st_ino), memory=_word(lambda: SHARED_MEMORY.stat().st_dev))


def _word(number: Callable[[], int]) -> str:
    """The machine's boot and a number that is its own within it."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{number()}"
    except OSError:
        return ""


def device_name(device: "torch.device") -> str:
    """``GPU-`` and the UUID of a CUDA device, the same in every process and container; ``cpu`` for the host's memory.

    Raises ValueError for a device of another kind.
    """
    if device.type == CPU:
        return CPU
    if device.type != "cuda":
        raise ValueError(f"device {device}: memory is shared between processes on CUDA devices and CPUs only")
    import torch

    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
