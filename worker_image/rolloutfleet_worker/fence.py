"""The fence: where an engine stands in a refit, and which control calls it accepts there.

Pure: no clock, no I/O. The launcher asks the fence before it acts and tells it what came of the act. Two rules hold at every step: weights
change only while generation is paused, and generation resumes only with one whole version that the fleet has committed.
"""

from dataclasses import dataclass, field, replace

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Call, WorkerState

_WHOLE = frozenset({WorkerState.SERVING, WorkerState.PAUSED})


@dataclass(frozen=True, slots=True)
class Identity:
    """Which pod of which fleet this is; calls meant for another are refused."""

    fleet: str
    fleet_uid: str
    pod_name: str
    pod_uid: str


@dataclass(frozen=True, slots=True)
class Fence:
    """An engine's place in the refit protocol, changed only by the methods below, each of which returns the next fence."""

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
        """Check who the call is meant for and adopt its epoch.

        Raises:
            ProblemError: WrongFleet, WrongPod or StaleEpoch; nothing has changed then.
        """
        if call.fleet_uid != self.identity.fleet_uid:
            raise ProblemError(
                ProblemCode.WRONG_FLEET,
                f"this pod belongs to fleet {self.identity.fleet} (uid {self.identity.fleet_uid}), the call names uid {call.fleet_uid}",
            )
        if call.pod_uid != self.identity.pod_uid:
            raise ProblemError(
                ProblemCode.WRONG_POD,
                f"this is pod {self.identity.pod_name} (uid {self.identity.pod_uid}), the call names uid {call.pod_uid}",
            )
        if call.epoch < self.epoch:
            raise ProblemError(
                ProblemCode.STALE_EPOCH, f"epoch {call.epoch} is over, this worker has seen epoch {self.epoch}"
            )
        return (
            replace(self, epoch=call.epoch)
            if call.epoch == self.epoch or not self.joined
            else replace(self, epoch=call.epoch, joined=False)
        )

    def started(self) -> "Fence":
        """vLLM answers and every rank has reported."""
        return replace(self, state=WorkerState.SERVING, message="") if self.state is WorkerState.STARTING else self

    def failed(self, message: str) -> "Fence":
        """vLLM has ended or does not answer; only a restart of the pod leads on from here."""
        return replace(self, state=WorkerState.FAILED, message=message)

    def admit(self, version: int) -> "Fence":
        return replace(self, admitted=version)

    def join_begins(self) -> "Fence":
        self._require("join", _WHOLE | {WorkerState.DIRTY})
        return replace(self, joined=False)

    def join_done(self) -> "Fence":
        return replace(self, joined=True)

    def pause_begins(self) -> "Fence":
        self._require("pause", _WHOLE | {WorkerState.DIRTY})
        return self

    def paused(self) -> "Fence":
        return replace(self, state=WorkerState.PAUSED) if self.state in _WHOLE else self

    def receive_begins(self, version: int) -> "Fence":
        """Weights may change from here on."""
        self._require("receive", {WorkerState.PAUSED, WorkerState.DIRTY})
        if not self.joined:
            raise ProblemError(
                ProblemCode.WRONG_STATE, f"this worker has not joined a group in epoch {self.epoch}; join first"
            )
        return replace(self, state=WorkerState.RECEIVING, version_in_flight=version)

    def receive_done(self) -> "Fence":
        self._require("end of receive", {WorkerState.RECEIVING})
        return replace(self, state=WorkerState.RECEIVED, message="")

    def receive_failed(self, *, touched: bool, was: WorkerState, message: str) -> "Fence":
        """The transfer ended early; ``was`` is the state before it, kept if no weight has been touched."""
        self._require("end of receive", {WorkerState.RECEIVING})
        if not touched:
            return replace(self, state=was, joined=False, version_in_flight=0)
        return self._dirty(f"the transfer of version {self.version_in_flight} ended half way: {message}")

    def commit(self, version: int) -> "Fence":
        """The received version is the fleet's from now on; repeating a commit changes nothing.

        Raises:
            ProblemError: WrongState or StaleVersion when that version is not here whole.
        """
        if self.version == version and self.state in _WHOLE:
            return replace(self, admitted=version)
        if self.state is not WorkerState.RECEIVED or self.version_in_flight != version:
            held = (
                f"version {self.version_in_flight} in state {self.state}"
                if self.version_in_flight
                else f"version {self.version} in state {self.state}"
            )
            raise ProblemError(ProblemCode.STALE_VERSION, f"cannot commit version {version}: this worker holds {held}")
        return replace(
            self,
            state=WorkerState.PAUSED,
            version=version,
            version_in_flight=0,
            admitted=version,
            await_first_refit=False,
            message="",
        )

    def cache_not_reset(self) -> "Fence":
        """The prefix cache still holds values of older weights, so generating would mix versions."""
        return self._dirty(f"the prefix cache could not be reset for version {self.version}")

    def resume_begins(self) -> "Fence":
        self._require("resume", _WHOLE)
        return self

    def resumed(self) -> "Fence":
        return replace(self, state=WorkerState.SERVING, message="")

    def aborted(self, reason: str) -> "Fence":
        """The epoch is over: the group is left; a whole but unpublished version counts as dirty."""
        left = replace(self, joined=False)
        if self.state in {WorkerState.RECEIVED, WorkerState.RECEIVING}:
            return left._dirty(f"version {self.version_in_flight} was received but never committed: {reason}")
        return left

    @property
    def resumable(self) -> bool:
        """Whether a paused engine may go on with the version it holds."""
        return self.state is WorkerState.PAUSED

    def unready_reason(self) -> str:
        """Why this engine must not generate; empty when it may. Requests queue inside vLLM while it is paused."""
        if self.state in {WorkerState.STARTING, WorkerState.DIRTY, WorkerState.FAILED}:
            return f"{self.state}: {self.message}"
        if self.await_first_refit:
            return "AwaitingFirstRefit: the engine started with dummy weights and no refit has completed"
        if self.admitted is None:
            return "AwaitingAdmission: the sync job has not told this worker which version the fleet has committed"
        if self.admitted != self.version:
            return f"Stale: holds version {self.version}, the fleet has committed version {self.admitted}; waits for the next refit"
        return ""

    def _dirty(self, message: str) -> "Fence":
        return replace(self, state=WorkerState.DIRTY, joined=False, message=message)

    def _require(self, act: str, states: "frozenset[WorkerState] | set[WorkerState]") -> None:
        if self.state not in states:
            hint = f": {self.message}" if self.message else ""
            allowed = ", ".join(sorted(states))
            raise ProblemError(
                ProblemCode.DIRTY if self.state is WorkerState.DIRTY else ProblemCode.WRONG_STATE,
                f"{act} needs the state to be one of {allowed}, it is {self.state}{hint}",
            )
