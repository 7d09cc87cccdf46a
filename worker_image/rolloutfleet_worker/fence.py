"""The fence: where an engine stands in a refit, and which control calls it accepts there.

Pure: no clock, no I/O. The launcher asks the fence before it acts and tells it what came of the act. Two rules hold at every step: weights
change only while no step of the model runs, and generation goes on only with one whole version that the fleet has committed.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rolloutfleet.contract.problems import ProblemCode, ProblemError
from rolloutfleet.contract.worker import Call, SleepLevel, WakeTag, WorkerState

_WHOLE = frozenset({WorkerState.SERVING, WorkerState.PAUSED})
_IN_FLIGHT = frozenset({WorkerState.RECEIVING, WorkerState.RECEIVED})


class Door(StrEnum):
    """What happens to requests that generate."""

    OPEN = "Open"
    """They enter; while vLLM is paused they queue inside it."""
    HELD = "Held"
    """They wait outside: weights are changing, and not even a stray resume may let them meet half a version."""
    CLOSED = "Closed"
    """They are refused, and those inside end."""


class Beside(StrEnum):
    """What lies in the second buffer, beside the live weights."""

    NOTHING = "Nothing"
    ARRIVING = "Arriving"
    WHOLE = "Whole"


class Stale(StrEnum):
    """Whether the engine may serve what it holds although the fleet has, or may have, a newer version."""

    NEVER = "Never"
    ALLOWED = "Allowed"
    OVER = "Over"
    """It might, and the time for it has run out: nothing but a new word of the sync job, or a commit, opens the door again."""


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
    beside: Beside = Beside.NOTHING
    lending: bool = False
    sleep_level: int = 0
    asleep: frozenset[WakeTag] = frozenset()
    """What has left the device."""
    lost: bool = False
    """The weights that would wake are of no version."""
    admitted: int | None = None
    stale: Stale = Stale.NEVER
    held: str = ""
    """Why a whole engine refuses requests all the same, since a refit failed; a commit ends it."""
    gave_up: str = ""
    """Why this worker left its last group by itself."""
    leaving: str = ""
    """Why the pod is about to end; what it has begun it finishes, and new requests had better go elsewhere."""
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
        """The fleet has committed this version, and nothing else may be served; what a fleet has committed never falls."""
        return replace(self, admitted=max(version, self.admitted or 0), stale=Stale.NEVER, held="")

    def admit_stale(self, version: int) -> "Fence":
        """The fleet has committed this version, or is about to commit one above it; what served until now may serve on for a while.

        A permission that has run out does not come back, and an engine that refuses requests gets none.
        """
        serves = not self.fenced_reason()
        return replace(
            self.admit(version), stale=Stale.ALLOWED if serves and self.stale is not Stale.OVER else self.stale
        )

    def hold(self, reason: str) -> "Fence":
        """Refuse requests for this reason, whole as the weights may be; an empty one lets them in."""
        return replace(self, held=reason)

    def stale_ends(self) -> "Fence":
        """The time for which an older version might be served has run out."""
        return replace(self, stale=Stale.OVER) if self.stale is Stale.ALLOWED else self

    def check_begins(self) -> "Fence":
        """A check reads where weights lie, which nothing can while they are asleep."""
        self._require_weights("check")
        return self

    def join_begins(self) -> "Fence":
        self._require_staying("join")
        self._require("join", _WHOLE | {WorkerState.DIRTY, WorkerState.ASLEEP})
        self._require_weights("join")
        if self.joined:  # a call that comes twice must not take the worker out of the group that the others count on
            raise ProblemError(
                ProblemCode.WRONG_STATE, f"join: this worker is in the group of epoch {self.epoch} already"
            )
        return replace(self._forgotten(), joined=False)

    def join_done(self) -> "Fence":
        return replace(self, joined=True, gave_up="")

    def prepare_begins(self, *, staged: bool) -> "Fence":
        """Making ready changes no weight, but it replaces the buffer that a staged version would lie in."""
        self._require_staying("prepare")
        self._require("prepare", _WHOLE if staged else _WHOLE | {WorkerState.DIRTY, WorkerState.ASLEEP})
        self._require_weights("prepare")
        self._require_joined()
        self._require_nothing_beside("prepare")
        return self

    def pause_begins(self) -> "Fence":
        self._require("pause", _WHOLE | {WorkerState.DIRTY, WorkerState.ASLEEP})
        return self

    def paused(self) -> "Fence":
        return replace(self, state=WorkerState.PAUSED) if self.whole else self

    def receive_begins(self, version: int, *, staged: bool = False) -> "Fence":
        """Weights may change from here on; those of a staged version only beside the live ones, which go on serving."""
        self._require_staying("receive")
        self._require_lacking("receive", version)
        if staged:
            self._require("receive beside the live weights", _WHOLE)
        else:
            self._require("receive", {WorkerState.PAUSED, WorkerState.DIRTY, WorkerState.ASLEEP})
            self._require_weights("receive")
        self._require_not_lending("receive beside the live weights" if staged else "receive")
        self._require_joined()
        self._require_nothing_beside("receive")
        if staged:
            return replace(self, version_in_flight=version, beside=Beside.ARRIVING)
        return replace(self, state=WorkerState.RECEIVING, version_in_flight=version)

    def receive_done(self) -> "Fence":
        if self.beside is Beside.ARRIVING:
            return replace(self, beside=Beside.WHOLE)
        return replace(self, state=WorkerState.RECEIVED, message="") if self.state is WorkerState.RECEIVING else self

    def receive_failed(self, *, touched: bool, was: "Fence", message: str) -> "Fence":
        """The transfer ended early; ``was`` is the fence before it, and holds again if no live weight has been touched."""
        if self.beside is not Beside.NOTHING:
            return replace(self._forgotten(), joined=False)
        if self.state is not WorkerState.RECEIVING:
            return self
        if not touched:
            return replace(self, state=was.state, message=was.message, joined=False, version_in_flight=0)
        return self._dirty(f"the transfer of version {self.version_in_flight} ended half way: {message}")

    def commit_begins(self, version: int) -> "Fence":
        """The version may be committed here only if it was received whole, or is held already."""
        if self.holds(version) or (self.state is WorkerState.RECEIVED and self.version_in_flight == version):
            return self
        if self.swaps_for(version):
            return self
        held = f"version {self.version_in_flight or self.version} in state {self.state}"
        if self.beside is Beside.ARRIVING:
            held += ", still arriving beside the live weights"
        if self.message or self.gave_up:
            held += f": {self.message or self.gave_up}"
        raise ProblemError(ProblemCode.STALE_VERSION, f"cannot commit version {version}: this worker holds {held}")

    def swaps_for(self, version: int) -> bool:
        """Whether committing this version means to copy it from beside the live weights into them."""
        return self.whole and self.beside is Beside.WHOLE and self.version_in_flight == version

    def swap_begins(self) -> "Fence":
        """The staged version is about to be copied into the live weights."""
        return replace(self, state=WorkerState.RECEIVING, beside=Beside.NOTHING)

    def swap_done(self) -> "Fence":
        """The live weights are the staged version, whole; only its commit is missing."""
        return self.receive_done()

    def swap_failed(self, message: str) -> "Fence":
        """The copy may have ended half way."""
        if self.state is WorkerState.FAILED:
            return self
        return self._dirty(f"the swap to version {self.version_in_flight} ended half way: {message}")

    def committed(self, version: int, *, serving: bool = False) -> "Fence":
        """The version is the fleet's and this worker's from now on, its cache treated as the policy says.

        ``serving`` is true after a swap in an engine that has not stopped serving.
        """
        if self.state is not WorkerState.RECEIVED:
            return self.admit(version) if self.holds(version) else self
        state = WorkerState.SERVING if serving else WorkerState.ASLEEP if self.asleep else WorkerState.PAUSED
        done = replace(self, state=state, version=version, version_in_flight=0, lost=False, message="")
        return replace(done.admit(version), await_first_refit=False)

    def adapter_committed(self, version: int) -> "Fence":
        """What lay beside the live weights was an adapter, and is served: these weights with it are the fleet's version from now on."""
        if self.state is WorkerState.FAILED:
            return self
        return replace(self._forgotten(), version=version, message="").admit(version)

    def cache_not_reset(self, version: int, why: str) -> "Fence":
        """The prefix cache still holds values of older weights, so generating would mix versions."""
        if self.state is WorkerState.FAILED:
            return self
        return self.admit(version)._dirty(f"the prefix cache could not be reset for version {version}: {why}")

    def resume_begins(self) -> "Fence":
        self._require("resume", _WHOLE | {WorkerState.ASLEEP})
        return self

    def resumed(self) -> "Fence":
        return replace(self, state=WorkerState.SERVING, message="") if self.whole else self

    def aborted(self, reason: str) -> "Fence":
        """The epoch is over: the group is left, staged bytes are forgotten; a whole but unpublished version counts as dirty."""
        left = replace(self._forgotten(), joined=False, lending=False)
        if self.state in _IN_FLIGHT:
            return left._dirty(f"version {self.version_in_flight} was received but never committed: {reason}")
        return left

    def gives_up(self, reason: str) -> "Fence":
        """Nobody has ended what this worker stands still for, and it is about to end that by itself; later calls are told why."""
        return replace(self, gave_up=reason)

    def sleep_begins(self, level: SleepLevel) -> "Fence":
        """An engine falls asleep with one whole version, or with none; repeating the same sleep changes nothing."""
        self._require("sleep", {WorkerState.SERVING, WorkerState.DIRTY, WorkerState.ASLEEP})
        self._require_nothing_beside("sleep")
        self._require_not_lending("sleep")
        if self.asleep and (self.asleep != frozenset(WakeTag) or self.sleep_level != level):
            raise ProblemError(
                ProblemCode.WRONG_STATE,
                f"sleep at level {int(level)}: this worker sleeps at level {self.sleep_level} with "
                f"{_names(self.asleep)} off the device; wake it first",
            )
        return self

    def slept(self, level: SleepLevel) -> "Fence":
        """Weights and cache have left the device; the deeper sleep drops the weights for good."""
        if self.state is WorkerState.FAILED:
            return self
        lost = self.lost or self.state is WorkerState.DIRTY or level is SleepLevel.DISCARD
        message = self.message or (f"slept at level {int(level)}: its weights are gone" if lost else "")
        return replace(
            self,
            state=WorkerState.ASLEEP,
            sleep_level=int(level),
            asleep=frozenset(WakeTag),
            lost=lost,
            message=message,
        )

    def wake_begins(self) -> "Fence":
        """Waking what is awake changes nothing."""
        self._require("wake", _WHOLE | {WorkerState.DIRTY, WorkerState.ASLEEP})
        return self

    def woken(self, tags: AbstractSet[WakeTag]) -> "Fence":
        """What the tags name is back; with all of it the engine serves, or is dirty when its weights are of no version."""
        left = self.asleep - tags
        awake = replace(self, asleep=left, sleep_level=self.sleep_level if left else 0)
        if left or self.state is not WorkerState.ASLEEP:
            return awake
        if self.lost:
            return replace(awake, lost=False)._dirty(f"{self.message}; refit it")
        return replace(awake, state=WorkerState.SERVING, message="")

    def lend_begins(self, version: int) -> "Fence":
        """Only live weights of the very version may be lent, and they may not change meanwhile, so nothing may lie staged that would."""
        if not self.holds(version) or not self.whole:
            raise ProblemError(
                ProblemCode.STALE_VERSION,
                f"cannot lend version {version}: this worker holds version {self.version} in state {self.state}",
            )
        self._require_not_lending("lend")
        self._require_nothing_beside("lend")
        return replace(self, lending=True)

    def lend_ended(self) -> "Fence":
        return replace(self, lending=False)

    def borrow_begins(self, version: int, *, staged: bool = False) -> "Fence":
        """The live weights are about to be overwritten by a peer's, or these to arrive beside them."""
        self._require_staying("borrow")
        self._require_lacking("borrow", version)
        if version < (self.admitted or 0):
            raise ProblemError(
                ProblemCode.STALE_VERSION, f"borrow version {version}: the fleet has committed version {self.admitted}"
            )
        self._require("borrow", {WorkerState.SERVING} if staged else {WorkerState.PAUSED, WorkerState.DIRTY})
        self._require_not_lending("borrow")
        self._require_nothing_beside("borrow")
        if staged:
            return replace(self, version_in_flight=version, beside=Beside.ARRIVING)
        return replace(self, state=WorkerState.RECEIVING, version_in_flight=version)

    def staged_borrow_failed(self) -> "Fence":
        """What has arrived beside the live weights is forgotten; they serve on, and a group that this worker is in stays."""
        return self._forgotten()

    @property
    def whole(self) -> bool:
        """Whether the worker holds one whole committed version, and so may generate with it."""
        return self.state in _WHOLE

    def holds(self, version: int) -> bool:
        """Whether this very version is here, whole and committed, be it asleep."""
        return self.version == version and (self.whole or (self.state is WorkerState.ASLEEP and not self.lost))

    @property
    def staged(self) -> bool:
        """Whether the version in flight lies beside the live weights, which still serve."""
        return self.beside is not Beside.NOTHING

    @property
    def door(self) -> Door:
        """What the API server does with requests that generate."""
        if self.fenced_reason():
            return Door.CLOSED
        return Door.HELD if self.state in _IN_FLIGHT else Door.OPEN

    def unready_reason(self) -> str:
        """Why this engine must get no new traffic; empty when it may. A pause within its deadline is no reason."""
        return self.fenced_reason() or (f"Leaving: {self.leaving}" if self.leaving else "")

    def leaves(self, reason: str) -> "Fence":
        """The pod has been told to end."""
        return replace(self, leaving=reason)

    def fenced_reason(self) -> str:
        """Why this engine must not generate at all; empty when it may."""
        if self.state in {WorkerState.STARTING, WorkerState.DIRTY, WorkerState.FAILED}:
            return f"{self.state}: {self.message}"
        if self.asleep:
            return f"Asleep: level {self.sleep_level}, {_names(self.asleep)} off the device; wake it"
        if self.await_first_refit:
            return "AwaitingFirstRefit: the engine started with dummy weights and no refit has completed"
        if self.admitted is None:
            return "AwaitingAdmission: the sync job has not told this worker which version the fleet has committed"
        if self.held:
            return f"Held: {self.held}"
        if self.stale is Stale.ALLOWED or (self.stale is Stale.OVER and self.state in _IN_FLIGHT):
            return ""
        if self.stale is Stale.OVER:
            newer = f"version {self.admitted}" if self.admitted != self.version else "a newer version"
            return (
                f"Stale: holds version {self.version}, the fleet has announced {newer}, and the time in which both may serve "
                "(spec.refit.rolling.maxStaleSeconds) is over; waits for a peer that lends it, or for the next refit"
            )
        if self.admitted != self.version:
            return (
                f"Stale: holds version {self.version}, the fleet has committed version {self.admitted}; "
                "waits for the next refit"
            )
        return ""

    def busy_reason(self) -> str:
        """Why new requests had better go to another engine although this one would keep them waiting; empty when there is no reason."""
        if self.state in _IN_FLIGHT and self.stale is not Stale.NEVER:
            return f"Stale: takes version {self.version_in_flight} over from a peer"
        return ""

    def _forgotten(self) -> "Fence":
        return replace(self, beside=Beside.NOTHING, version_in_flight=0) if self.staged else self

    def _dirty(self, message: str) -> "Fence":
        return replace(self, state=WorkerState.DIRTY, joined=False, message=message)

    def _require(self, act: str, states: AbstractSet[WorkerState]) -> None:
        if self.state not in states:
            hint = f": {self.message or self.gave_up}" if self.message or self.gave_up else ""
            raise ProblemError(
                ProblemCode.DIRTY if self.state is WorkerState.DIRTY else ProblemCode.WRONG_STATE,
                f"{act} needs the state to be one of {', '.join(sorted(states))}, it is {self.state}{hint}",
            )

    def _require_staying(self, act: str) -> None:
        if self.leaving:
            raise ProblemError(ProblemCode.WRONG_STATE, f"{act}: this pod is about to end: {self.leaving}")

    def _require_lacking(self, act: str, version: int) -> None:
        """A call that comes twice must not take a version apart that has been committed since."""
        if self.holds(version):
            message = f"{act} version {version}: this worker holds it already, whole and committed"
            raise ProblemError(ProblemCode.STALE_VERSION, message)

    def _require_weights(self, act: str) -> None:
        if WakeTag.WEIGHTS in self.asleep:
            raise ProblemError(
                ProblemCode.WRONG_STATE,
                f"{act}: the weights are asleep at level {self.sleep_level}; wake tag weights first",
            )

    def _require_joined(self) -> None:
        if not self.joined:
            why = self.gave_up or "join first"
            raise ProblemError(
                ProblemCode.WRONG_STATE, f"this worker has not joined a group in epoch {self.epoch}; {why}"
            )

    def _require_not_lending(self, act: str) -> None:
        if self.lending:
            raise ProblemError(
                ProblemCode.WRONG_STATE,
                f"{act}: this worker lends its weights to a peer; wait for the end or abort the lending",
            )

    def _require_nothing_beside(self, act: str) -> None:
        if self.staged:
            raise ProblemError(
                ProblemCode.WRONG_STATE,
                f"{act}: version {self.version_in_flight} lies staged beside the live weights; commit or abort it first",
            )


def _names(tags: AbstractSet[WakeTag]) -> str:
    return " and ".join(sorted(tags))
