"""The manifests that this rank has checked, by digest, so that no later call has to carry one."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.names import KEPT_MANIFESTS
from rolloutfleet.contract.worker import LayoutSummary
from rolloutfleet.layout import Layout, checkpoint_layout
from rolloutfleet_worker.rank.layout_capture import Captured
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.room import buffer_starts

_NAMED_REASONS: Final = 8


@dataclass(slots=True)
class Known:
    """One checked manifest: what the loader was seen to do with it, and the layout in use."""

    captured: Captured
    layout: Layout
    """All detours until a load has been compared with the captured one."""
    compared: bool = False

    @property
    def manifest(self) -> Manifest:
        return self.captured.manifest

    def detoured_modules(self) -> tuple[str, ...]:
        """The modules that the layout's detours feed."""
        return self.captured.modules_of(detour.source for detour in self.layout.detours)


class KnownManifests:
    """The last few manifests that were checked without faults."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Known] = OrderedDict()

    def find(self, digest: str) -> Known | None:
        """The manifest with this digest, which counts as used then."""
        if digest in self._known:
            self._known.move_to_end(digest)
        return self._known.get(digest)

    def add(self, captured: Captured) -> Known:
        """Keeps it in the place of the one that was used longest ago."""
        known = Known(captured, checkpoint_layout(captured.manifest, captured.layout.shape))
        digest = captured.layout.manifest_digest
        self._known[digest] = known
        self._known.move_to_end(digest)
        while len(self._known) > KEPT_MANIFESTS:
            self._known.popitem(last=False)
        return known

    def require(self, digest: str) -> Known:
        """The manifest with this digest.

        Raises:
            RankError: it was never checked here, or too many others have been since.
        """
        known = self.find(digest)
        if known is None:
            raise RankError(
                f"manifest {digest} is not among the last {KEPT_MANIFESTS} that were checked here; check it first"
            )
        return known


def summarize(layout: Layout, room_bytes: int) -> LayoutSummary:
    """What the sync job gets to know of a layout."""
    return LayoutSummary(
        digest=layout.digest,
        shape=layout.shape,
        placed_bytes=layout.placed_bytes,
        staging_bytes=buffer_starts(layout)[1],
        detoured_bytes=layout.detoured_bytes,
        detours=layout.reasons(_NAMED_REASONS),
        room_bytes=room_bytes,
    )
