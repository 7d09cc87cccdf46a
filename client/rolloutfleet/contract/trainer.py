"""The sync job's surface for trainers.

Routes, all below ``/rolloutfleet/v1``, all with the fleet's bearer token:

=========  ==============================================  ==================================================================
GET        ``fleet``                                       :class:`FleetView`
GET        ``history``                                     :class:`~rolloutfleet.contract.history.RefitHistory`
POST       ``sessions``                                    :class:`OpenSession` -> :class:`SessionView`
POST       ``sessions/{session}/renew``                    -> :class:`SessionView`
DELETE     ``sessions/{session}``                          leave; the group is torn down
POST       ``sessions/{session}/refits``                   :class:`RequestRefit` -> :class:`RefitView`
GET        ``refits/{refit}?after=SEQUENCE&wait=SECONDS``   :class:`RefitView`, as soon as its sequence is above ``after``
POST       ``refits/{refit}/joined``                       :class:`TrainerJoined`
POST       ``refits/{refit}/prepared``                     :class:`TrainerPrepared`
POST       ``refits/{refit}/sent``                         :class:`TrainerSent`
POST       ``refits/{refit}/failed``                       :class:`TrainerFailed`
POST       ``cache/reset``                                 -> :class:`CacheResetView`
POST       ``sleep``                                       :class:`SleepFleet` -> :class:`FleetView`, when every engine sleeps
POST       ``wake``                                        :class:`WakeFleet` -> :class:`FleetView`, when every engine is awake
POST       ``release``                                     -> :class:`FleetView`; held engines serve the committed version again
=========  ==============================================  ==================================================================

A trainer renews its session at least every third of ``lease_seconds``; any call of the session renews it too. When the lease ends the
refit in flight is aborted and the group torn down.

A refit that loses a member before its version is decided is attempted again without it, under a higher epoch: :attr:`RefitView.attempt`
rises, ``join`` is ordered anew, and what was ordered in the attempt before is over, whether or not the trainer saw it end.

Failures answer with :class:`~rolloutfleet.contract.problems.Problem`.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.history import Gap, RefitProgress
from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.contract.names import CONTRACT_VERSION
from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.problems import Problem, ProblemCode
from rolloutfleet.contract.worker import Locality, Rendezvous, SleepLevel, WakeTag, WorkerState


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Phase(StrEnum):
    """Where a refit, or the sync job between refits, stands."""

    PENDING = "Pending"
    FORMING = "Forming"
    PREPARING = "Preparing"
    READY = "Ready"
    PAUSING = "Pausing"
    TRANSFERRING = "Transferring"
    VERIFYING = "Verifying"
    COMMITTING = "Committing"
    RESUMING = "Resuming"
    COMPLETE = "Complete"
    ABORTING = "Aborting"
    REFORMING = "Reforming"
    """The group forms again without the members that the attempt before has lost."""
    FAILED = "Failed"


class MemberView(_Message):
    """One engine as the sync job last heard of it."""

    engine: int
    pod_name: str
    address: str
    ready: bool
    state: WorkerState
    version: int
    ranks: int
    epoch: int = 0
    adapters: dict[str, int] = Field(default_factory=dict)
    """By name of each adapter that it serves, the version that brought it."""
    message: str = ""


class FleetView(_Message):
    """The fleet as the sync job sees it now."""

    contract_version: int = CONTRACT_VERSION
    fleet: str
    namespace: str
    fleet_uid: str
    model: str
    """Name under which the engines serve the model."""
    phase: Phase
    epoch: int
    version: int
    held: str = ""
    """Why whole engines are held back from serving after a refit that failed; empty while they are not."""
    transport: Transport
    engines: int
    """How many engines the fleet should have; ``members`` may hold fewer."""
    members: tuple[MemberView, ...]
    endpoints: tuple[str, ...]
    """Base URLs of the engines that hold the committed version and are Ready, by engine."""
    progress: RefitProgress | None = None
    """The refit under way; told by the route ``fleet`` alone, as are the gaps."""
    gaps: tuple[Gap, ...] = ()
    """Why a group that forms is not whole, and which variables differ between engines."""


class OpenSession(_Message):
    """A trainer's request to become the fleet's trainer."""

    contract_version: int = CONTRACT_VERSION
    trainer: str
    """A name that people recognise in status, such as host and process."""
    rendezvous: Rendezvous
    ranks: int = Field(default=1, ge=1)
    """Processes of the trainer that take part in sending; they are the group's first ranks."""
    world_size: int | None = Field(default=None, ge=2)
    """Workers plus trainer ranks as the trainer counts them; refused when the fleet's differs. None leaves the count to the fleet."""
    devices: tuple[str, ...] = ()
    """GPU UUIDs on which the trainer's tensors lie, one per trainer rank; ``cpu`` for tensors in the host's memory."""
    locality: Locality = Field(default_factory=Locality)
    nccl_version: str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    take_over: bool = False
    """Replace a trainer whose lease has not ended."""


class SessionView(_Message):
    """The granted session."""

    session: str
    lease_seconds: float
    fleet: FleetView


class RequestRefit(_Message):
    """A request to give every engine these tensors as this version."""

    version: int = Field(ge=1)
    manifest: Manifest
    adapter: AdapterSpec | None = None
    """The tensors are an adapter's: the version is the base weights of the one before with this adapter on top."""
    repair: bool = False
    """The version is the committed one, sent again for the engines that lack it; those that serve it are left alone. The sender answers
    for its being the same weights."""


class TrainerJoin(_Message):
    """Instruction: join the group now; the trainer's processes are ranks 0 to ``trainer_ranks - 1``."""

    epoch: int
    transport: Transport
    wire: Wire
    trainer_ranks: int
    world_size: int
    deadline_seconds: float


class TrainerPrepare(_Message):
    """Instruction: publish what each trainer rank holds, read the workers' layouts, and derive the program."""

    epoch: int
    layouts: tuple[str, ...]
    """Digest of the layout of every worker rank, in rank order."""
    deadline_seconds: float


class TrainerSend(_Message):
    """Instruction: send the manifest's tensors now."""

    epoch: int
    deadline_seconds: float


class LostMember(_Message):
    """An engine that an attempt of a refit went on without."""

    pod_name: str
    phase: str
    """Where the attempt stood."""
    code: ProblemCode
    message: str


class Attempt(_Message):
    """An attempt of a refit that lost members and was made again without them."""

    attempt: int
    epoch: int
    lost: tuple[LostMember, ...]
    seconds: dict[str, float]
    """Wall seconds by phase, up to the time when every survivor was free again."""


class RefitResult(_Message):
    """A refit that every engine of its last attempt has committed."""

    version: int
    epoch: int
    members: tuple[str, ...]
    tensors: int
    nbytes: int
    digest: str
    live_digest: str
    """One digest over the live parameters of an engine; every engine had the same one."""
    seconds: dict[str, float]
    """Wall seconds by phase."""
    pause_seconds: float
    """From the first pause call to the last engine resumed; for a staged version, the longest that any engine stood still."""
    gigabytes_per_second: float
    transport: Transport = Transport.NATIVE
    reason: str = ""
    """Why this transport, and not a faster one."""
    staged: bool = False
    """Whether the weights arrived while the engines served."""
    detours: tuple[str, ...] = ()
    """What went through vLLM's loader, and why; at most eight sentences."""
    slowest: str = ""
    """The pod and local rank that was last to have the version."""
    attempts: tuple[Attempt, ...] = ()
    """Those before the one that completed; their seconds count in ``seconds`` too."""


class RefitView(_Message):
    """Where a refit stands, and what the trainer has to do now."""

    refit: str
    version: int
    epoch: int
    phase: Phase
    attempt: int = 1
    sequence: int
    """Rises with each change; pass it as ``after`` to wait for the next."""
    waiting_for: tuple[str, ...] = ()
    """Pod names (or ``trainer``) whose answer the phase still needs."""
    join: TrainerJoin | None = None
    prepare: TrainerPrepare | None = None
    send: TrainerSend | None = None
    problem: Problem | None = None
    result: RefitResult | None = None


class TrainerJoined(_Message):
    """The trainer is in the group."""

    epoch: int


class TrainerPrepared(_Message):
    """Every trainer rank is ready to send."""

    epoch: int


class TrainerSent(_Message):
    """The trainer has sent everything; what it sent, for comparison with what arrived."""

    epoch: int
    tensors: int
    nbytes: int
    digests: dict[str, str]
    """What a rank must hold, by the digest of its layout; under the key ``""`` for every rank, when tensors are broadcast whole."""


class TrainerFailed(_Message):
    """The trainer cannot go on in this epoch; the attempt is aborted."""

    epoch: int
    """0 gives the refit up, whatever its epoch."""
    message: str
    peer_lost: bool = False
    """The trainer itself is sound: it was cut off by another party, and can join another group."""
    lost_ranks: tuple[int, ...] = ()
    """Ranks whose connection to the trainer ended without a word, so that their processes are probably gone."""


class SleepFleet(_Message):
    """A wish that every engine sleeps."""

    level: SleepLevel


class WakeFleet(_Message):
    """A wish that every engine wakes, or takes back what the tags name."""

    tags: tuple[WakeTag, ...] = ()


class CacheResetView(_Message):
    """Whether each engine emptied its prefix cache."""

    reset: dict[str, bool]
    """vLLM's answer by pod name; every engine is listed."""
