"""What a rank does with tensors that take the detour: vLLM's loader, and the comparison that tells what needs no detour any more."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rolloutfleet.layout import Layout
from rolloutfleet_worker.rank.calibration import Calibration
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.live_tensors import live_parameters
from rolloutfleet_worker.rank.manifests import Known
from rolloutfleet_worker.rank.reload import PartialReload, Reload

if TYPE_CHECKING:
    from rolloutfleet_worker.rank.fresh import FreshLoad


class Loading:
    """The detours of one version: :meth:`take` as they arrive, then :meth:`finish`, or :meth:`abandon` at any point."""

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, known: Known, fresh: "FreshLoad | None" = None
    ) -> None:
        self._model = model
        self._known = known
        self._fresh = fresh
        self._reload = (
            PartialReload(model, vllm_config, known.detoured_modules())
            if known.compared
            else Reload(model, vllm_config)
        )
        self._calibration: Calibration | None = None
        if _provable(known):
            self._calibration = Calibration(model, known.captured, known.layout if known.compared else None)
        self.seconds = 0.0
        """Spent in the loader while tensors arrived."""

    @property
    def begun(self) -> bool:
        """Whether a live weight may have changed."""
        return self._reload.begun

    def take(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Loads whole source tensors; they may be kept until their layer is complete."""
        began = time.monotonic()
        if self._calibration is not None:
            self._calibration.arrived(tensors)
        if self._fresh is not None:
            self._fresh.keep(tensors)
        self._reload.load(iter(tensors))
        self.seconds += time.monotonic() - began

    def finish(self, received_digest: str) -> tuple[bool, str]:
        """Whether the layout has changed by what the load has proved, and the digest of the live parameters."""
        self._reload.finish()
        if self._fresh is not None:
            self._fresh.compare(self._known.layout)
        known, changed = self._known, False
        had_detours = bool(known.layout.detours)
        if self._calibration is not None:
            layout = self._calibration.finish()
            changed = layout.digest != known.layout.digest
            known.layout, known.compared = layout, True
        # Where nothing took the detour, what was summed as received is what the model computes with.
        return changed, live_digest(self._model) if had_detours else received_digest

    def abandon(self) -> None:
        self._reload.abandon()


def live_destinations(model: torch.nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    """The live parameters that the layout writes in place, flat, by name."""
    wanted = {parameter.name for parameter in layout.parameters if not parameter.temporary}
    if not wanted:
        return {}
    parameters, _ = live_parameters(model)
    return {name: parameter.data.view(-1) for name, parameter in parameters if name in wanted}


def _provable(known: Known) -> bool:
    """Whether a load of the detours could prove that more may be written in place."""
    if not known.compared:
        return True
    detoured = {detour.source for detour in known.layout.detours}
    live = len(known.captured.layout.live)
    return any(p.source in detoured and p.parameter < live for p in known.captured.layout.placements)
