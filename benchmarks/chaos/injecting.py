"""Puts a fault into a fleet at the drawn moment of a phase, and takes it away again."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from benchmarks.chaos.cluster import ClusterFleet
from benchmarks.chaos.faults import PHASES, Fault, Kind, Who
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.parties import Party
from benchmarks.chaos.standing import get
from rolloutfleet.contract.trainer import Phase

GIVEN_UP_SECONDS: Final = 6.0
"""After so long the supervisor does what a cluster does after minutes: what is frozen or lost for good is started anew, a pod elsewhere."""
SLOW_MEGABITS: Final = 8


AnyFleet = Fleet | ClusterFleet


class Reachable(Protocol):
    """Processes that a signal finds."""

    def signal(self, number: signal.Signals, title: str = "") -> None:
        """To the main one, or to the one with that title; ProcessLookupError when it is not there."""


class Observer:
    """Follows a refit by the sync job's long poll, in a thread of its own, until it is closed or the refit has ended."""

    def __init__(self, fleet: AnyFleet, refit: str) -> None:
        self.seen: list[tuple[float, Phase]] = []
        self._url = f"{fleet.address}/rolloutfleet/v1/refits/{refit}"
        self._token = fleet.token
        self._closed = threading.Event()
        self._change = threading.Condition()
        self._over = False
        threading.Thread(target=self._follow, name="observer", daemon=True).start()

    @property
    def phase(self) -> Phase:
        """The last that was seen."""
        return self.seen[-1][1] if self.seen else Phase.READY

    def await_phase(self, phase: Phase, seconds: float) -> Phase:
        """The phase, or the first one behind it where a refit does not pass it; TimeoutError when neither came."""
        with self._change:
            came = self._change.wait_for(lambda: self._reached(phase) or self._over, seconds)
            if not came or not self._reached(phase):
                raise TimeoutError(
                    f"the refit came to no phase {phase} within {seconds:g} s, it stands at {self.phase}"
                )
            return self.phase

    def close(self) -> None:
        """Poll no more: a poll would renew the lease of a trainer that is gone."""
        self._closed.set()

    def _reached(self, phase: Phase) -> bool:
        order = PHASES.index(phase)
        return any(seen in PHASES and PHASES.index(seen) >= order for _, seen in self.seen) or self._ended()

    def _ended(self) -> bool:
        return self.phase in {Phase.COMPLETE, Phase.FAILED}

    def _follow(self) -> None:
        after = 0
        while not self._closed.is_set() and not self._ended():
            try:
                view = get(f"{self._url}?after={after}&wait=1", 3.0, self._token)
            except OSError:
                break
            after = view["sequence"]
            with self._change:
                if not self.seen or self.seen[-1][1] != view["phase"]:
                    self.seen.append((time.monotonic(), Phase(view["phase"])))
                self._change.notify_all()
        with self._change:
            self._over = True
            self._change.notify_all()


class Injection:
    """A fault that has been put in; :meth:`settle` returns when it has been taken away where it is to be."""

    def __init__(self, fleet: AnyFleet, fault: Fault) -> None:
        self._fault = fault
        self._undo: threading.Timer | None = None
        self.seconds = time.monotonic()
        if not self._signal(fleet):
            if not isinstance(fleet, Fleet):
                raise ValueError(f"{fault}: a fleet in a cluster takes signals alone")
            self._inject(fleet)

    def settle(self) -> None:
        """Wait until the supervisor has undone it."""
        if self._undo is not None:
            self._undo.join()

    def _signal(self, fleet: AnyFleet) -> bool:
        """Whether the fault is one that a signal makes, and one undoes."""
        fault = self._fault
        party = _party_of(fleet, fault)
        word = fleet.kind.rank_title if fault.who is Who.RANK else ""
        match fault.kind:
            case Kind.KILL:
                party.signal(signal.SIGKILL, word)
            case Kind.END:
                party.signal(signal.SIGTERM, word)
            case Kind.STOP | Kind.SILENCE:
                party.signal(signal.SIGSTOP, word)
                self._later(fault.lasts_seconds, lambda: party.signal(signal.SIGCONT, word))
            case _:
                return False
        return True

    def _inject(self, fleet: Fleet) -> None:
        """The faults that take a network, or a supervisor, of the fleet's own."""
        fault = self._fault
        party = _party_here(fleet, fault)
        match fault.kind:
            case Kind.FREEZE:
                party.signal(signal.SIGSTOP, fleet.kind.rank_title if fault.who is Who.RANK else "")
                if fault.who is not Who.TRAINER:
                    self._later(GIVEN_UP_SECONDS, party.kill)
            case Kind.CUT:
                party.plug.cut()
                self._later(fault.lasts_seconds, party.plug.mend)
            case Kind.LOSE:
                party.plug.cut()
                if fault.who is Who.ENGINE:
                    self._later(GIVEN_UP_SECONDS, lambda: fleet.replace_engine(fault.engine))
                elif fault.who is Who.SYNC:
                    self._later(GIVEN_UP_SECONDS, lambda: _start_elsewhere(party))
            case Kind.SLOW:
                party.plug.slow(SLOW_MEGABITS)
                self._later(fault.lasts_seconds, party.plug.quicken)
            case Kind.REFUSE:
                fleet.kubelet.forget(party)
                party.kill()
                self._later(fault.lasts_seconds, lambda: fleet.kubelet.run(party))

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        def attempt() -> None:
            try:
                undo()
            except ProcessLookupError:
                return  # It has been started anew since, by the kubelet.

        self._undo = threading.Timer(seconds, attempt)
        self._undo.start()


def _start_elsewhere(party: Party) -> None:
    """Another pod behind the same Service: for all others it has the address of the one before."""
    party.kill()
    party.plug.mend()


def _party_of(fleet: AnyFleet, fault: Fault) -> Reachable:
    if isinstance(fleet, Fleet):
        return _party_here(fleet, fault)
    match fault.who:
        case Who.TRAINER:
            return fleet.trainer.party
        case Who.SYNC:
            return fleet.sync
        case Who.API:
            return fleet.api
        case Who.OPERATOR:
            return fleet.operator
        case _:
            return fleet.engines[fault.engine].party


def _party_here(fleet: Fleet, fault: Fault) -> Party:
    match fault.who:
        case Who.TRAINER:
            return fleet.trainer.party
        case Who.SYNC:
            return fleet.sync
        case Who.API:
            return fleet.api
        case Who.OPERATOR:
            raise ValueError(f"{fault}: no operator runs here, the supervisor plays it")
        case _:
            return fleet.engines[fault.engine].party
