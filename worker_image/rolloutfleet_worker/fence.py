"""The fence: where an engine stands in a refit, and which control calls it accepts there.

Pure: no clock, no I/O. The launcher asks the fence before it acts and tells it what came of the act. Two rules hold at every step: weights
change only while generation is paused, and generation resumes only with one whole version that the fleet has committed.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Call, WorkerState

_WHOLE = frozenset({WorkerState.SERVING, WorkerState.PAUSED})


class Door(StrEnum):
    """What happens to requests that generate."""

    OPEN = "Open"
    """They enter; while vLLM is paused they queue inside it."""
    HELD = "Held"
    """They wait outside: weights are changing, and not even a stray resume may let them meet half a version."""
    CLOSED = "Closed"
    """They are refused, and those inside end."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which pod of which fleet this is; calls meant for another are refused."""

    fleet: str
    fleet_uid: str
    pod_name: str
    pod_uid: str
    instance: str
    """New each time the launcher starts."""


@dataclass(frozen=True, slots=True)
class Fence:
    """An engine's place in the refit protocol, changed only by the methods below, each of which returns the next fence.

    Methods named ``…_begins`` raise :class:`ProblemError` (WrongState, Dirty, StaleVersion) when the act is not allowed now. A failed
    worker stays failed whatever was under way.
    """

    identity: Identity
    await_first_refit: bool = False
    state: WorkerState = WorkerState.STARTING
    epoch: int = 0
    joined: bool = False
    version: int = 0
    version_in_flight: int = 0
    admitted: int | None = None
    message: str = field(default="vLLM is starting")

    def accept(self, call: Call) -> "Fence":
        """Check who the call is meant for and adopt its epoch; a newer one ends the membership of the older group.

        Raises:
            ProblemError: WrongFleet, WrongPod (also for another instance) or StaleEpoch; nothing has changed then.
        """
        mine = self.identity
        if call.fleet_uid != mine.fleet_uid:
            raise ProblemError(
                ProblemCode.WRONG_FLEET,
                f"this pod belongs to fleet {mine.fleet} (uid {mine.fleet_uid}), the call names uid {call.fleet_uid}",
            )
        if call.pod_uid != mine.pod_uid:
            raise ProblemError(
                ProblemCode.WRONG_POD,
                f"this is pod {mine.pod_name} (uid {mine.pod_uid}), the call names uid {call.pod_uid}",
            )
        if call.instance != mine.instance:
            raise ProblemError(
                ProblemCode.WRONG_POD,
                f"this is instance {mine.instance} of pod {mine.pod_name}, the call names instance {call.instance}: "
                "the container has started anew since",
            )
        if call.epoch < self.epoch:
            raise ProblemError(
                ProblemCode.STALE_EPOCH, f"epoch {call.epoch} is over, this worker has seen epoch {self.epoch}"
            )
        return replace(self, epoch=call.epoch, joined=self.joined and call.epoch == self.epoch)

    def started(self) -> "Fence":
        """vLLM answers and every rank has reported."""
        return replace(self, state=WorkerState.SERVING, message="") if self.state is WorkerState.STARTING else self

    def failed(self, message: str) -> "Fence":
        """vLLM has ended or does not answer; only a restart of the container leads on from here."""
        return replace(self, state=WorkerState.FAILED, message=message)

    def admit(self, version: int) -> "Fence":
        """The fleet has committed this version; what a fleet has committed never falls."""
        return replace(self, admitted=max(version, self.admitted or 0))

    def join_begins(self) -> "Fence":
        self._require("join", _WHOLE | {WorkerState.DIRTY})
        return replace(self, joined=False)

    def join_done(self) -> "Fence":
        return replace(self, joined=True)

    def pause_begins(self) -> "Fence":
        self._require("pause", _WHOLE | {WorkerState.DIRTY})
        return self

    def paused(self) -> "Fence":
        return replace(self, state=WorkerState.PAUSED) if self.whole else self

    def receive_begins(self, version: int) -> "Fence":
        """Weights may change from here on."""
        self._require("receive", {WorkerState.PAUSED, WorkerState.DIRTY})
        if not self.joined:
            raise ProblemError(
                ProblemCode.WRONG_STATE, f"this worker has not joined a group in epoch {self.epoch}; join first"
            )
        return replace(self, state=WorkerState.RECEIVING, version_in_flight=version)

    def receive_done(self) -> "Fence":
        return replace(self, state=WorkerState.RECEIVED, message="") if self.state is WorkerState.RECEIVING else self

    def receive_failed(self, *, touched: bool, was: "Fence", message: str) -> "Fence":
        """The transfer ended early; ``was`` is the fence before it, and holds again if no weight has been touched."""
        if self.state is not WorkerState.RECEIVING:
            return self
        if not touched:
            return replace(self, state=was.state, message=was.message, joined=False, version_in_flight=0)
        return self._dirty(f"the transfer of version {self.version_in_flight} ended half way: {message}")

    def commit_begins(self, version: int) -> "Fence":
        """The version may be committed here only if it was received whole, or is held already."""
        if self.holds(version) or (self.state is WorkerState.RECEIVED and self.version_in_flight == version):
            return self
        held = f"version {self.version_in_flight or self.version} in state {self.state}"
        raise ProblemError(ProblemCode.STALE_VERSION, f"cannot commit version {version}: this worker holds {held}")

    def committed(self, version: int) -> "Fence":
        """The version is the fleet's and this worker's from now on, its cache treated as the policy says."""
        if self.state is not WorkerState.RECEIVED:
            return self.admit(version) if self.holds(version) else self
        done = replace(self, state=WorkerState.PAUSED, version=version, version_in_flight=0, message="")
        return replace(done.admit(version), await_first_refit=False)

    def cache_not_reset(self, version: int, why: str) -> "Fence":
        """The prefix cache still holds values of older weights, so generating would mix versions."""
        if self.state is WorkerState.FAILED:
            return self
        return self.admit(version)._dirty(f"the prefix cache could not be reset for version {version}: {why}")

    def resume_begins(self) -> "Fence":
        self._require("resume", _WHOLE)
        return self

    def resumed(self) -> "Fence":
        return replace(self, state=WorkerState.SERVING, message="") if self.whole else self

    def aborted(self, reason: str) -> "Fence":
        """The epoch is over: the group is left; a whole but unpublished version counts as dirty."""
        left = replace(self, joined=False)
        if self.state in {WorkerState.RECEIVED, WorkerState.RECEIVING}:
            return left._dirty(f"version {self.version_in_flight} was received but never committed: {reason}")
        return left

    @property
    def whole(self) -> bool:
        """Whether the worker holds one whole committed version, and so may generate with it."""
        return self.state in _WHOLE

    def holds(self, version: int) -> bool:
        """Whether this very version is here, whole and committed."""
        return self.version == version and self.whole

    @property
    def door(self) -> Door:
        """What the API server does with requests that generate."""
        if self.unready_reason():
            return Door.CLOSED
        return Door.HELD if self.state in {WorkerState.RECEIVING, WorkerState.RECEIVED} else Door.OPEN

    def unready_reason(self) -> str:
        """Why this engine must get no traffic; empty when it may. A pause within its deadline is no reason."""
        if self.state in {WorkerState.STARTING, WorkerState.DIRTY, WorkerState.FAILED}:
            return f"{self.state}: {self.message}"
        if self.await_first_refit:
            return "AwaitingFirstRefit: the engine started with dummy weights and no refit has completed"
        if self.admitted is None:
            return "AwaitingAdmission: the sync job has not told this worker which version the fleet has committed"
        if self.admitted != self.version:
            return (
                f"Stale: holds version {self.version}, the fleet has committed version {self.admitted}; "
                "waits for the next refit"
            )
        return ""

    def _dirty(self, message: str) -> "Fence":
        return replace(self, state=WorkerState.DIRTY, joined=False, message=message)

    def _require(self, act: str, states: AbstractSet[WorkerState]) -> None:
        if self.state not in states:
            hint = f": {self.message}" if self.message else ""
            raise ProblemError(
                ProblemCode.DIRTY if self.state is WorkerState.DIRTY else ProblemCode.WRONG_STATE,
                f"{act} needs the state to be one of {', '.join(sorted(states))}, it is {self.state}{hint}",
            )
