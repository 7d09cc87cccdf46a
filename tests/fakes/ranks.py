"""All ranks of a group as threads of one process, over real gloo."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.transport.gloo import Group, connect_store, form_group, host_store
from rolloutfleet.transport.store import SessionStore

SECONDS = 30.0


def deadline(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


class Ranks:
    """The groups of one epoch, one for each rank, and a thread for each to act in."""

    def __init__(self, world_size: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=world_size)
        self.store: SessionStore = host_store(hold_listening_socket("127.0.0.1"), SECONDS)
        port = self.store.store.port
        stores = [self.store, *(connect_store("127.0.0.1", port, SECONDS) for _ in range(1, world_size))]
        self.stores = dict(enumerate(stores))
        self.groups: dict[int, Group] = self.run(
            {
                rank: lambda rank=rank: form_group(self.stores[rank], 1, rank, world_size, SECONDS)
                for rank in range(world_size)
            }
        )

    def run(self, work: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Results by rank, of work that all ranks do at once; the error of the first one that failed, if any did."""
        futures = {rank: self._threads.submit(step) for rank, step in work.items()}
        return {rank: future.result(SECONDS) for rank, future in futures.items()}

    def outcomes(self, work: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Like :meth:`run`, with the exception of a rank that failed in place of its result."""
        futures = {rank: self._threads.submit(step) for rank, step in work.items()}
        return {rank: future.exception(SECONDS) or future.result() for rank, future in futures.items()}

    def close(self) -> None:
        for group in self.groups.values():
            group.close()
        self._threads.shutdown(wait=True)
