"""What a trainer says of the GPUs that it sees."""

from rolloutfleet.locality import CPU, device_name


def device_word(gpu: int | None) -> str:
    """The UUID of a GPU, as engines give theirs; ``cpu`` for None."""
    if gpu is None:
        return CPU
    import torch

    return device_name(torch.device("cuda", gpu))


def working_gpu(gpu: int | None) -> int | None:
    """The GPU itself, or for None the one that the calling thread uses; None where torch sees none."""
    import torch

    return gpu if gpu is not None or not torch.cuda.is_available() else int(torch.cuda.current_device())


def nccl_version() -> str:
    """Version of the NCCL that torch ships, such as ``2.27.5``; empty where torch sees no GPU."""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
