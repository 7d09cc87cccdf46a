"""How many cores a process takes to copy and sum tensors in the host's memory: few, for the engines of the machine need the others.

A memory copy, or a sum, keeps a core busy however many there are; torch would take all of them for as long as it lasts.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

ENV_HOST_THREADS: Final = "ROLLOUTFLEET_HOST_THREADS"
"""Names the number of threads, for this process."""

DEFAULT_THREADS: Final = 2
"""Without :data:`ENV_HOST_THREADS`; a recent core digests about 7 GB/s, and copies faster."""

_SERIAL: Final = (1 << 15) - 1
"""Elements up to which torch uses the calling thread alone."""

_RUN_BYTES: Final = 64 << 20
"""A copy as large as this is one task."""

Task = TypeVar("Task")


def host_threads() -> int:
    """How many threads this process may use, at least one.

    Raises ValueError when :data:`ENV_HOST_THREADS` is not a positive whole number.
    """
    text = os.environ.get(ENV_HOST_THREADS, "")
    if not text:
        return min(DEFAULT_THREADS, os.cpu_count() or 1)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{ENV_HOST_THREADS} is {text!r}; it must be a whole number of threads, at least 1")
    return int(text)


def share_out(tasks: Sequence[Task], work: Callable[[Sequence[Task]], None], threads: int | None = None) -> None:
    """Has every task worked on once, by ``threads`` threads (as a rule :func:`host_threads`), each with its own share of them.

    The n-th thread takes the n-th task, then the one ``threads`` later, and so on. Raises what ``work`` raises, when all have ended.
    """
    count = min(threads or host_threads(), len(tasks))
    if count <= 1:
        if tasks:
            work(tasks)
        return

    def share(number: int) -> None:
        with torch.no_grad():
            work(tasks[number::count])

    with ThreadPoolExecutor(count, thread_name_prefix="rolloutfleet-host") as pool:
        for done in [pool.submit(share, number) for number in range(count)]:
            done.result()


def copy_in_host(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], threads: int | None = None) -> None:
    """Copies each source into the target of its number, of equal shape and perhaps another type; all lie in the host's memory.

    Targets must not overlap. ``threads`` as for :func:`share_out`.
    """
    tasks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if target.is_contiguous() and source.is_contiguous():
            size = max(_RUN_BYTES // target.element_size(), 1)
            tasks += zip(target.detach().view(-1).split(size), source.detach().view(-1).split(size), strict=True)
        else:
            tasks.append((target.detach(), source.detach()))

    def copy(some: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in some:
            copy_alone(target, source)

    share_out(tasks, copy, threads)


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies one tensor of the host's memory into another of equal shape, on the calling thread alone."""
    if target.numel() == 0:
        return
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return
    places, pieces = zip(*_serial_pieces(target, source), strict=True)
    torch._foreach_copy_(list(places), list(pieces))


def _serial_pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if target.numel() <= _SERIAL:
        yield target, source
        return
    elements = target[0].numel()
    if elements > _SERIAL:
        for pair in zip(target.unbind(0), source.unbind(0), strict=True):
            yield from _serial_pieces(*pair)
        return
    together = _SERIAL // elements
    yield from zip(target.split(together), source.split(together), strict=True)
