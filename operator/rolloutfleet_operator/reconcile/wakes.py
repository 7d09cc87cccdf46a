"""Who is woken by what. A loop sleeps until something it knows has changed, and its own writes do not wake it."""

import asyncio
from collections.abc import Hashable
from typing import Any


class Wakes:
    """Flags by key, and the last payload of every object, so that an event that changes nothing wakes nobody."""

    def __init__(self) -> None:
        self._flags: dict[Hashable, set[asyncio.Event]] = {}
        self._payloads: dict[Hashable, Any] = {}

    def open(self, key: Hashable) -> asyncio.Event:
        """A flag for one loop to wait on; several loops may share a key."""
        flag = asyncio.Event()
        self._flags.setdefault(key, set()).add(flag)
        return flag

    def close(self, key: Hashable, flag: asyncio.Event) -> None:
        """Forgets the flag."""
        flags = self._flags.get(key, set())
        flags.discard(flag)
        if not flags:
            self._flags.pop(key, None)

    def wake(self, key: Hashable) -> None:
        """Wakes the loops of a key, when there are any."""
        for flag in self._flags.get(key, ()):
            flag.set()

    def wake_all(self) -> None:
        """Wakes every loop: something that concerns all of them changed."""
        for key in self._flags:
            self.wake(key)

    def changed(self, object_id: Hashable, payload: Any) -> bool:
        """Whether the object's payload differs from the last one told; None forgets the object."""
        before = self._payloads.get(object_id)
        if payload is None:
            self._payloads.pop(object_id, None)
        else:
            self._payloads[object_id] = payload
        return bool(before != payload)
