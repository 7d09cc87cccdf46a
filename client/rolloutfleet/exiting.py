"""Threads that may be inside torch when the interpreter ends: they are told to stop, and waited for, before it does.

A daemon thread that comes back from C++ into an interpreter that is ending is unwound by Python, through frames that cannot be: C++ then
ends the process ("terminate called without an active exception"). A thread that is not a daemon could hold up the end for ever.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

ENDING_SECONDS: Final = 2.0
"""How long all of them together are waited for; what is stuck in C++ by then comes back no more."""

_running: dict[threading.Thread, Callable[[], None]] = {}
_guard = threading.Lock()


def start_thread(name: str, work: Callable[[], None], stop: Callable[[], None]) -> threading.Thread:
    """A thread that does the work; ``stop``, which makes the work return soon, is called if the interpreter ends before that.

    Both are kept alive until the work has returned.
    """

    def run() -> None:
        try:
            work()
        finally:
            with _guard:
                _running.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _guard:
        _running[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_threads() -> None:
    with _guard:
        running = dict(_running)
    try:
        # One that raises keeps no other from being called.
        with ExitStack() as stops:
            for stop in running.values():
                stops.callback(stop)
    finally:
        deadline = time.monotonic() + ENDING_SECONDS
        for thread in running:
            thread.join(max(deadline - time.monotonic(), 0.0))


# Threads do not come along into a forked process, and their groups are its parent's.
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)
os.register_at_fork(after_in_child=_running.clear)
