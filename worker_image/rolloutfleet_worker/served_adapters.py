"""The adapters that vLLM's API server offers: each version under a name, a number and a path of its own.

vLLM keys the blocks of its prefix cache by an adapter's name and path, so that none that an older version computed is ever read, and no
cache has to be reset. A version that nobody can ask for any more stays loaded, and its file where it is, as long as a request in flight
computes with it: vLLM may load it anew at any step.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rolloutfleet.contract.adapter import versioned_name
from rolloutfleet_worker.adapter_files import remove_others

OFFERED: Final = 2
"""The version in use, and the one before it, for clients that have pinned it."""


@dataclass(slots=True)
class _Versions:
    """What vLLM knows of one adapter, oldest first, as its own requests for them."""

    offered: list[Any] = field(default_factory=list)
    retired: list[Any] = field(default_factory=list)


class ServedAdapters:
    """Changes what one API server offers; calls come one at a time."""

    def __init__(self) -> None:
        self._known: dict[str, _Versions] = {}

    async def serve(self, engine: Any, models: Any, name: str, version: int, path: str) -> None:
        """Load a version and give it to requests that name the adapter from now on; those in flight keep theirs.

        A version that is served already is left alone. Raises what vLLM does for an adapter that it cannot load; what was offered before
        is offered still.
        """
        from vllm.lora.request import LoRARequest

        versions = self._known.get(name, _Versions())
        unique = versioned_name(name, version)
        if versions.offered and versions.offered[-1].lora_name == unique:
            return
        request = LoRARequest(lora_name=unique, lora_int_id=models.lora_id_counter.inc(1), lora_path=path)
        await engine.add_lora(request)
        self._known[name] = versions
        models.lora_requests[name] = models.lora_requests[unique] = request
        # What was retired before cannot have been looked up since, so that whoever uses it is known to the engine by now.
        await self._unload(engine, versions)
        versions.offered.append(request)
        while len(versions.offered) > OFFERED:
            old = versions.offered.pop(0)
            del models.lora_requests[old.lora_name]
            versions.retired.append(old)
        kept = {Path(each.lora_path) for each in (*versions.offered, *versions.retired)}
        await asyncio.to_thread(remove_others, Path(path).parent, kept)

    def withdraw(self, models: Any, names: list[str]) -> None:
        """Offer these adapters no more."""
        for name in names:
            versions = self._known[name]
            del models.lora_requests[name]
            for request in versions.offered:
                del models.lora_requests[request.lora_name]
            versions.retired += versions.offered
            versions.offered = []

    async def forget_loaded(self, engine: Any) -> None:
        """Have vLLM load every adapter anew when a request next names it: the memory that held them has been asleep."""
        for versions in self._known.values():
            for request in (*versions.offered, *versions.retired):
                await engine.remove_lora(request.lora_int_id)

    @staticmethod
    async def _unload(engine: Any, versions: _Versions) -> None:
        used = {state.lora_name for state in engine.output_processor.request_states.values()}
        for old in [each for each in versions.retired if each.lora_name not in used]:
            await engine.remove_lora(old.lora_int_id)
            versions.retired.remove(old)
