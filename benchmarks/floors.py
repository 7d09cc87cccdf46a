"""Floors: how fast this machine moves the bytes of a model when nothing else is in the way."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.record import median, say
from rolloutfleet.layout import Block
from rolloutfleet.tiles.digesting import SumTable
from rolloutfleet.tiles.hostwork import ENV_HOST_THREADS

CHUNK_BYTES = 1 << 30


def synchronize() -> None:
    """Wait for the device; nothing on a machine without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give what this process's allocator holds unused back to the device, for others."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timed(work: Callable[[], object], rounds: int, warm: int = 2) -> list[float]:
    """Seconds of each round, the device idle before and after."""
    for _ in range(warm):
        work()
    seconds = []
    for _ in range(rounds):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def flat_copy(nbytes: int, device: str, rounds: int) -> list[float]:
    """Seconds of a copy of ``nbytes`` within the device's memory in chunks of 1 GiB, which is a refit's floor on one GPU."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 256) if nbytes < 1 << 20 else None
    if source is None:
        source = torch.empty(nbytes // 4 * 4, dtype=torch.uint8, device=device)
        source.view(torch.int32).random_(0, 2**31 - 1)
    target = torch.empty_like(source)
    pairs = list(zip(target.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True))

    def copy() -> None:
        for there, here in pairs:
            there.copy_(here)

    seconds = timed(copy, rounds)
    say(f"floor: flat copy of {nbytes / 1e9:.3f} GB: {median(seconds) * 1e3:.3f} ms")
    return seconds


def plain_read(nbytes: int, device: str, rounds: int) -> list[float]:
    """Seconds of one read of ``nbytes`` of the device's memory: the floor of a digest."""
    source = torch.empty(nbytes // 8, dtype=torch.int64, device=device).random_()
    return timed(lambda: torch.sum(source), rounds)


def from_pinned(nbytes: int, rounds: int) -> list[float]:
    """Seconds of a copy of ``nbytes`` from the host's pinned memory onto the GPU."""
    size = min(nbytes, CHUNK_BYTES)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    times = -(-nbytes // size)

    def copy() -> None:
        for _ in range(times):
            target.copy_(source, non_blocking=True)

    return timed(copy, rounds)


def host_digest(nbytes: int, rounds: int, threads: int) -> list[float]:
    """Seconds of a digest of ``nbytes`` in the host's memory by so many threads, as a trainer takes one of its tensors there."""
    source = _host_words(nbytes)
    whole = Block.contiguous(0, source.numel())
    table = SumTable.build([(source, whole, 0, whole, 4)], sources=1, device=source.device)
    with _environment(ENV_HOST_THREADS, str(threads)):
        return timed(table.run, rounds)


def host_read(nbytes: int, rounds: int) -> list[float]:
    """Seconds of a plain sum over ``nbytes`` in the host's memory by one thread: the floor of a digest there."""
    source = _host_words(nbytes).view(torch.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return timed(lambda: torch.sum(source), rounds)
    finally:
        torch.set_num_threads(threads)


def _host_words(nbytes: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (nbytes // 8 * 2,), dtype=torch.int32)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
