"""The trainer process that talks to the fleet: rank 0 of a team, or the only one."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from rolloutfleet.channel import Channel
from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.trainer import FleetView, RefitResult, RefitView, RequestRefit
from rolloutfleet.delivery import Cargo
from rolloutfleet.errors import SessionLost
from rolloutfleet.refit import Progress, Refit
from rolloutfleet.session import RankPlace, Session, TrainerIdentity, open_session
from rolloutfleet.sources import source_of
from rolloutfleet.sources.source import WeightSource
from rolloutfleet.team.crew import Crew

logger = logging.getLogger("rolloutfleet")


class LeadingTrainer:
    """Opens sessions and drives refits, one at a time; the other ranks of the team do as it does."""

    def __init__(self, channel: Channel, identity: TrainerIdentity, crew: Crew) -> None:
        self._channel = channel
        self._identity = identity
        self._crew = crew
        self._session: Session | None = None
        self._places: tuple[int | None, bool, tuple[RankPlace, ...]] = (None, True, ())
        """What the session was opened with: this rank's GPU, whether its memory can be shared, and the places of the others."""
        self._known: Manifest | None = None

    def refit(
        self,
        tensors: Any,
        version: int,
        timeout: float,
        progress: Progress | None,
        adapter: AdapterSpec | None = None,
        *,
        repair: bool = False,
    ) -> RefitResult:
        """As :meth:`rolloutfleet.Fleet.refit`, or with an adapter :meth:`rolloutfleet.Fleet.refit_adapter`."""
        deadline = time.monotonic() + timeout
        self._crew.open_round()
        try:
            result = self._refit(tensors, version, deadline, progress, adapter, repair)
        except BaseException as error:
            self._crew.failed(error)
            raise
        self._crew.ended(result)
        return result

    def close(self) -> None:
        """Leaves the group, ends the session and the team."""
        self._drop_session()
        self._crew.close()

    def _refit(
        self,
        tensors: Any,
        version: int,
        deadline: float,
        progress: Progress | None,
        adapter: AdapterSpec | None,
        repair: bool,
    ) -> RefitResult:
        source = source_of(tensors, team=self._crew.ranks > 1)
        own = self._known = source.manifest(self._known)
        digest = own.digest()
        manifest, others = self._crew.muster(version, own, digest, deadline, adapter)
        cargo = Cargo(source, manifest, digest if manifest is own else manifest.digest(), version, repair)
        places = [RankPlace(ready.device, ready.locality) for ready in others]
        session, accepted = self._request(cargo, adapter, places, deadline)
        refit = Refit(self._channel, session, self._crew, cargo, accepted)
        return refit.run(max(deadline - time.monotonic(), 0.0), progress)

    def _request(
        self, cargo: Cargo, adapter: AdapterSpec | None, others: Sequence[RankPlace], deadline: float
    ) -> tuple[Session, RefitView]:
        request = RequestRefit(version=cargo.version, manifest=cargo.manifest, adapter=adapter, repair=cargo.repair)
        for attempt in (1, 2):
            session = self._loaded_session(cargo, others, deadline)
            try:
                return session, self._channel.post(f"sessions/{session.id}/refits", request, RefitView)
            except SessionLost:
                # Nothing has begun yet, so a session that ended while the trainer was busy elsewhere is simply opened anew.
                session.mark_lost()
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _loaded_session(self, cargo: Cargo, others: Sequence[RankPlace], deadline: float) -> Session:
        """A session to whose workers every trainer rank has told what it holds, and nothing else of this manifest before."""
        session = self._open_session(cargo.source, others)
        if self._load(session, cargo, deadline):
            logger.info("tensors are held by other ranks than before: a new session begins")
            self._drop_session()
            session = self._open_session(cargo.source, others)
            self._load(session, cargo, deadline)
        return session

    def _load(self, session: Session, cargo: Cargo, deadline: float) -> bool:
        moved = session.rank.load(cargo)
        return self._crew.begin(session.id, session.rendezvous, cargo.manifest, cargo.digest, deadline) or moved

    def _open_session(self, source: WeightSource, others: Sequence[RankPlace]) -> Session:
        """The session of before, unless it is lost or tensors now lie elsewhere than the fleet was told when it opened."""
        places = source.gpu(), source.shareable(), tuple(others)
        if self._session is not None and self._session.usable and places == self._places:
            return self._session
        self._drop_session()
        view = self._channel.get("fleet", FleetView)
        self._session, self._places = open_session(self._channel, view, self._identity, *places), places
        return self._session

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
