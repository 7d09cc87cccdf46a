"""Transfers by layout, whatever carries the bytes: prepared once in an epoch, received as often as the trainer sends."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rolloutfleet.layout import Holdings, Layout
from rolloutfleet.transport.exchange import await_holdings, publish_layout
from rolloutfleet_worker.rank.adapters import KnownAdapter
from rolloutfleet_worker.rank.broadcasting import TRANSFER_ERRORS
from rolloutfleet_worker.rank.link import RankError, is_cut_off
from rolloutfleet_worker.rank.loading import live_destinations
from rolloutfleet_worker.rank.manifests import Known
from rolloutfleet_worker.rank.membership import Membership
from rolloutfleet_worker.rank.staging import Staging
from rolloutfleet_worker.wire import Frame

Take = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True)
class Order:
    """One version that is to be received."""

    version: int
    deadline: float
    """A time of ``time.monotonic``."""
    cancelled: threading.Event


class Load(Protocol):
    """What becomes of source tensors that take the detour."""

    seconds: float
    """Spent while tensors arrived."""

    @property
    def begun(self) -> bool:
        """Whether a live weight may have changed."""
        ...

    def take(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Whole source tensors, which may be kept."""
        ...

    def finish(self, received_digest: str) -> tuple[bool, str]:
        """Whether the layout has changed by what the load has proved, and the digest of the live parameters."""
        ...

    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks have agreed on before a transfer."""

    member: Membership
    known: Known | KnownAdapter
    layouts: Sequence[str]
    """Of all worker ranks, in rank order."""
    model: torch.nn.Module
    staging: Staging | None
    staged: bool
    """Whether the live weights stay as they are until the version is committed."""
    deadline: float
    cancelled: threading.Event

    def destinations(self, staging: Staging | None) -> dict[str, torch.Tensor]:
        """Where what arrives lies, flat, by parameter name."""
        return staging.destinations if staging is not None else live_destinations(self.model, self.known.layout)

    def agree(self) -> tuple[Holdings, ...]:
        """What every trainer rank holds, after this rank's layout has been published; raises what the store does."""
        publish_layout(self.member.store, self.known.layout)
        digest = self.known.layout.manifest_digest
        return await_holdings(self.member.store, digest, self.member.trainer_ranks, self.deadline, self.cancelled)


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a rank holds now."""

    nbytes: int
    digest: str


class Transfer(ABC):
    """The transfers of one manifest, with one layout, in one epoch."""

    def __init__(self, plan: Plan) -> None:
        self.known = plan.known
        self.layout: Layout = plan.known.layout
        self.staged = plan.staged
        self._plan = plan
        self.landed = False
        """Whether any byte of the last version may lie in its destination; not where receiving failed before the first one."""
        self._addresses: tuple[int, ...] = ()

    def receive(self, loading: Load, staging: Staging | None, order: Order) -> Frame:
        """The report of a version that lies whole where it should.

        Raises:
            RankError: the transfer or the load failed; ``touched`` when live parameters may hold a part of it.
        """
        began = time.monotonic()
        self.landed = False
        try:
            arrived = self._pull(self._plan.destinations(staging), order, loading.take)
            received = time.monotonic()
            changed, live = loading.finish(arrived.digest)
        except TRANSFER_ERRORS as error:
            loading.abandon()
            touched = loading.begun or (staging is None and self.layout.placed_bytes > 0 and self.landed)
            rank = self._plan.member.rank
            raise RankError(
                f"rank {rank}: {type(error).__name__}: {error}", touched=touched, cut_off=is_cut_off(error)
            ) from error
        ended = time.monotonic()
        return {
            # Sums cover every tensor of the manifest, those of which this rank takes nothing with zeros.
            "tensors": len(self.known.manifest.tensors),
            "nbytes": arrived.nbytes,
            "received_digest": arrived.digest,
            "live_digest": live,
            "layout_changed": changed,
            "receive_seconds": received - began - loading.seconds,
            "load_seconds": loading.seconds + ended - received,
        }

    @abstractmethod
    def close(self) -> None:
        """Let go of what belongs to the trainer; receiving again takes hold of it again."""

    @abstractmethod
    def _pull(self, destinations: dict[str, torch.Tensor], order: Order, take: Take) -> Arrived:
        """Receives everything, and gives source tensors that take the detour to ``take``; sets :attr:`landed` with the first byte."""

    def _moved(self, destinations: Mapping[str, torch.Tensor]) -> bool:
        """Whether they lie elsewhere than was noted: a reload may have moved parameters, a second buffer may be a new one."""
        return self._addresses != _places(destinations)

    def _aimed(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """Notes where the destinations lie to which all is directed now."""
        self._addresses = _places(destinations)


def _places(destinations: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in destinations.values())
