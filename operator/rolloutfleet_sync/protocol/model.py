"""The state of the sync job, as immutable values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto

from pydantic import BaseModel

from rolloutfleet.contract.adapter import AdapterSpec
from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.members import Member, Roster
from rolloutfleet.contract.policy import RefitPolicy, Transport, Wire
from rolloutfleet.contract.problems import Problem
from rolloutfleet.contract.trainer import Attempt, OpenSession, Phase, SleepFleet, TrainerSent, WakeFleet
from rolloutfleet.contract.worker import LayoutSummary, LendReport, ReceiveReport, WorkerReport
from rolloutfleet_sync.protocol.record import Record

TERMINAL = frozenset({Phase.COMPLETE, Phase.FAILED})
PAUSED_PHASES = frozenset({Phase.PAUSING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.COMMITTING, Phase.RESUMING})
"""Phases in which engines that receive in place may be paused."""
BESIDE_PHASES = frozenset({Phase.TRANSFERRING, Phase.VERIFYING})
"""Those of them in which engines serve on while a version arrives beside the live one."""


class Verb(StrEnum):
    """The call that a worker is asked to carry out, by its route; REPORT is the root."""

    REPORT = ""
    ADMIT = "admit"
    CHECK = "check"
    JOIN = "join"
    PREPARE = "prepare"
    PAUSE = "pause"
    RECEIVE = "receive"
    COMMIT = "commit"
    RESUME = "resume"
    ABORT = "abort"
    RESET_CACHE = "reset-cache"
    SLEEP = "sleep"
    WAKE = "wake"
    LEND = "lend"
    LET_GO = "let-go"
    BORROW = "borrow"


class Step(StrEnum):
    """Where a refit stands inside its phase."""

    GATHER = auto()
    CHECK = auto()
    JOIN = auto()
    PREPARE = auto()
    INTENT = auto()
    PAUSE = auto()
    RECEIVE = auto()
    VERIFY = auto()
    RECORD = auto()
    COMMIT = auto()
    RESUME = auto()
    ABORT = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True)
class Identity:
    """Which fleet the sync job works for."""

    fleet: str
    namespace: str
    fleet_uid: str
    model: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals in seconds that are not part of a fleet's policy."""

    lease: float = 30.0
    poll: float = 1.0
    """Between reports of a member that is not admitted yet."""
    heartbeat: float = 5.0
    """Between reports of an admitted member."""
    call: float = 5.0
    """Deadline of a call that belongs to no phase."""
    unreachable: float = 10.0
    """A member of a refit that has been silent for this long is lost."""
    aborting: float = 10.0
    retry: float = 0.5
    sleeping: float = 120.0
    """Deadline of falling asleep and of waking."""
    borrowing_retry: float = 2.0
    """Before a loan that failed is tried again; doubled each time, up to a minute."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What is known of one member of the roster."""

    member: Member
    poll_at: float
    report: WorkerReport | None = None
    reported_by: int = 0
    """The call that brought the report: an answer may be older than it looks, but not older than its question."""
    failure: Problem | None = None
    """Why the last report could not be had; None while the member answers."""
    failing_since: float = float("inf")
    call: int | None = None
    """The background call under way; there is never more than one."""
    abort_owed: bool = False
    """An abort did not reach it."""
    pause_failed: bool = False
    """It did not stand still for the copy of a staged version that is committed: the next pause ends its requests."""

    @property
    def pod_name(self) -> str:
        return self.member.pod_name

    @property
    def leaving(self) -> bool:
        """Whether it is about to go, by the operator's word or its own."""
        return self.member.leaving or (self.report is not None and self.report.leaving)


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's line in a closed ledger."""

    engine: int
    pod_name: str
    pod_uid: str
    instance: str
    address: str
    ranks: int
    offset: int
    """Rank of its first process; the trainer's ranks come before all workers."""


@dataclass(frozen=True, slots=True)
class Session:
    """A trainer and its lease."""

    id: str
    request: OpenSession
    expires: float


@dataclass(frozen=True, slots=True)
class Choice:
    """How a refit's weights travel."""

    transport: Transport
    """Never Auto."""
    wire: Wire
    staged: bool
    reason: str
    """One sentence for people."""


Layouts = Mapping[str, tuple[LayoutSummary, ...]]
"""By pod uid, by local rank."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What trainer and workers have laid out, and need not lay out again."""

    manifest_digest: str
    layouts: tuple[str, ...]
    """Digest of the layout of every worker rank, in rank order."""
    staged: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator that trainer and workers hold between refits of one session."""

    session: str
    epoch: int
    seats: tuple[Seat, ...]
    trainer_ranks: int
    transport: Transport
    wire: Wire
    layouts: Mapping[str, Layouts] = field(default_factory=dict)
    """By digest of each manifest that every member has found loadable and still remembers, the last one used last."""
    adapters: frozenset[str] = frozenset()
    """Those of the digests that are an adapter's."""
    prepared: Preparation | None = None


@dataclass(frozen=True, slots=True)
class Refit:
    """The bringing of the fleet to a version, in one attempt, or in several with ever fewer members."""

    id: str
    session: str
    trainer: str
    version: int
    manifest: Manifest | None
    """None once the refit has ended."""
    manifest_digest: str
    """The manifest's key: with an adapter, the adapter is part of it."""
    tensors: int
    nbytes: int
    adapter: AdapterSpec | None = None
    """What the tensors are, where they are not the model's own weights."""
    repair: bool = False
    """The version is committed already, and goes to those alone that lack it."""
    phase: Phase = Phase.PENDING
    step: Step = Step.NONE
    epoch: int = 0
    attempt: int = 1
    ended: tuple[Attempt, ...] = ()
    """The attempts before this one."""
    survivors: Mapping[str, str] | None = None
    """By pod uid, the instance of each that may take part in this attempt; None while everybody of the roster may."""
    lost: Mapping[str, Problem] = field(default_factory=dict)
    """By pod uid, the members that this attempt has lost before the decision."""
    cut_off: frozenset[str] = frozenset()
    """Pod uids of members whose connection the trainer has seen end; lost, unless somebody else is."""
    final: bool = False
    """No attempt follows when this one is aborted."""
    absent: frozenset[int] = frozenset()
    """Engines that the first attempt left behind when its ledger closed."""
    close_at: float = float("inf")
    """When the ledger closes without those that are still waited for."""
    sequence: int = 1
    started: float = 0.0
    first_call: int = 0
    """Reports that were asked for before this one do not count."""
    phase_started: float = 0.0
    deadline: float = float("inf")
    seats: tuple[Seat, ...] = ()
    trainer_ranks: int = 1
    choice: Choice | None = None
    """Known once every member has checked the manifest."""
    layouts: Layouts = field(default_factory=dict)
    waiting: frozenset[str] = frozenset()
    """Pod uids whose answer the step still needs."""
    retry_at: Mapping[str, float] = field(default_factory=dict)
    trainer_pending: bool = False
    faults: Mapping[str, ManifestFaults] = field(default_factory=dict)
    received: Mapping[str, ReceiveReport] = field(default_factory=dict)
    received_before: Mapping[str, int] = field(default_factory=dict)
    """By pod uid, the first call that can only be answered after the member had the version whole."""
    arrived: Mapping[str, float] = field(default_factory=dict)
    """By pod uid, when the member was heard to have the version whole."""
    slowest: str = ""
    """The pod and local rank that was last to have the version."""
    sent: TrainerSent | None = None
    live_digest: str = ""
    decided: bool = False
    """The commit has been handed to the store: the refit can no longer be aborted."""
    committed: bool = False
    casualties: Mapping[str, Problem] = field(default_factory=dict)
    """Members that did not finish after the decision, by pod uid."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of all attempts, by phase."""
    left_paused: frozenset[str] = frozenset()
    """Pod uids of engines that have committed and wait to be resumed."""
    pause_started: float | None = None
    pause_seconds: float = 0.0
    problem: Problem | None = None

    @property
    def active(self) -> bool:
        return self.phase is not Phase.PENDING and self.phase not in TERMINAL

    @property
    def staged(self) -> bool:
        """Whether the version arrives beside the live weights, while the engines serve."""
        return self.choice is not None and self.choice.staged

    @property
    def may_hold_engines(self) -> bool:
        """Whether engines may be paused, or about to swap: nothing that can wait is written meanwhile."""
        return self.phase in PAUSED_PHASES and not (self.staged and self.phase in BESIDE_PHASES)

    def seat(self, pod_uid: str) -> Seat:
        return next(seat for seat in self.seats if seat.pod_uid == pod_uid)


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call whose answer is still to come."""

    number: int
    pod_uid: str
    verb: Verb
    refit: str = ""
    """Empty for background calls."""
    round_id: str = ""
    """The round that asked for it."""
    borrower: str = ""
    """The pod uid for whose loan it is made."""


@dataclass(frozen=True, slots=True)
class Round:
    """A trainer's wish that goes to every engine at once."""

    id: str
    verb: Verb
    wish: SleepFleet | WakeFleet | None
    seconds: float
    """Deadline of each engine."""
    waiting: frozenset[str]
    """Pod uids."""
    answers: Mapping[str, BaseModel | Problem]
    """By pod name; a Problem from an engine that could not be asked or did not do it."""
    held: frozenset[str] = frozenset()
    """Those of the waiting that are asked when they have ended a loan."""


@dataclass(frozen=True, slots=True)
class Loan:
    """An attempt to give an engine the committed version out of a peer's memory."""

    version: int
    instance: str
    """The borrower's."""
    attempts: int = 0
    """Those that have ended."""
    misfits: frozenset[str] = frozenset()
    """Instances of peers whose weights the borrower has refused for their shape."""
    problem: str = ""
    """Why the last one failed."""
    retry_at: float = float("-inf")
    staged: bool = False
    """The attempt under way brings the version beside the live weights, while the borrower serves."""
    cannot_stage: bool = False
    """The borrower has no room for that."""
    known_after: int = 0
    """What the borrower said before this call is not how it is since the last attempt in place."""
    donor: str = ""
    """Pod uid of the peer that lends now; empty between attempts."""
    donor_instance: str = ""
    deadline: float = float("inf")
    """When the attempt has to be over."""
    lent: LendReport | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the sync job knows."""

    identity: Identity
    policy: RefitPolicy
    timing: Timing = Timing()
    record: Record | None = None
    """None until the status has been read."""
    epoch: int = 0
    """Highest epoch that any party has seen; a kept group always has this one."""
    reading: bool = True
    """The record is not known, or no longer: nothing is written before it has been read."""
    read_at: float = float("-inf")
    """When to read it next; infinite while a read is under way."""
    roster: Roster | None = None
    members: Mapping[str, MemberRecord] = field(default_factory=dict)
    session: Session | None = None
    group: Group | None = None
    refit: Refit | None = None
    queued: Refit | None = None
    finished: tuple[Refit, ...] = ()
    published: tuple[tuple[int, float], ...] = ()
    """Versions, and when each was seen to become the fleet's; the last ones."""
    left_behind: frozenset[int] = frozenset()
    """Engines that were not in the last group: until they are up again, the next one does not wait for them."""
    rounds: Mapping[str, Round] = field(default_factory=dict)
    """Rounds under way or not yet shown, by id."""
    loans: Mapping[str, Loan] = field(default_factory=dict)
    """By pod uid of the borrower."""
    calls: Mapping[int, PendingCall] = field(default_factory=dict)
    write: int | None = None
    """The durable write under way for the refit."""
    next_id: int = 1
    stopping: bool = False

    @property
    def version(self) -> int:
        return self.record.version if self.record else 0

    def least_members(self, refit: Refit) -> int:
        """The fewest engines with which this refit begins, or goes on; whoever can be repaired is, however few they are."""
        return 1 if refit.repair else self.policy.min_ready

    @property
    def active(self) -> Refit | None:
        """The refit under way."""
        return self.refit if self.refit and self.refit.active else None


def initial_state(identity: Identity, policy: RefitPolicy, timing: Timing | None = None) -> State:
    """A state that knows nothing yet; its first :class:`~rolloutfleet_sync.protocol.events.Tick` asks for the status."""
    return State(identity=identity, policy=policy, timing=timing or Timing())
